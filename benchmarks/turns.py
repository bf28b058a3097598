"""Large clients computed one after the other (the default) or at once: memory according to XLA, and CPU seconds."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from firsts import regression
from measured import later
from script import Row

import hyperpush as hp
from hyperpush.engines.compiled.compile import counting

TITLE, PROCESSES, FROM_DISK = "Large clients in turn (vectors of the params per client, without the data)", 1, False
CLIENTS, EXAMPLES, WIDTH = 6, 2, 300_000


def compare(method: Any) -> Row:
    """Compare clients in turn with all at once: memory of the largest program, and CPU seconds of a later call."""
    task, network = regression(CLIENTS, EXAMPLES, WIDTH), hp.networks.RandomDirected(CLIENTS)
    data = 2 * sum(leaf.nbytes for leaf in jax.tree.leaves(task.train))
    verb: Any = hp.train if isinstance(method, hp.extend.InnerSolver) else hp.hypergradient
    row, seconds = {}, []
    for name, batch in (("at_once", CLIENTS), ("in_turn", None)):
        engine = hp.Simulate(clients_per_batch=batch, compile_fully=True)

        def run(engine: Any = engine) -> Any:
            return jax.tree.leaves(verb(task, method, network, key=0, engine=engine, certify=False).task.params)

        with counting() as counts:
            run()
        row[f"vectors_{name}"] = (counts.peak - data) / (4 * CLIENTS * WIDTH)
        seconds.append(later(run, 5)[1])
    return row | {"CPU_s_at_once": seconds[0], "CPU_s_in_turn": seconds[1], "ratio": seconds[1] / seconds[0]}


CASES: dict[str, Callable[[], Row]] = {
    "SGP(20)": partial(compare, hp.SGP(20, 0.01)),
    "TrackedHGP(10)": partial(compare, hp.TrackedHGP(10)),
    "TreeCG()": partial(compare, hp.hypergradients.TreeCG()),
}
