"""Time of a round: against a loop over clients in Python, and as the number of clients grows."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import jax
import loop
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray
from script import Row, main, option
from timing import exponent, in_new_process, machine, measure_rows, peak_megabytes, per_round

import hyperpush as hp
from hyperpush.base.errors import HyperpushError
from hyperpush.networks import Network

TOLERANCE = 1e-4
CHECKED = 5  # rounds after which engine and loop must agree
METHODS = (("SGP", 1), ("HGP", 1), ("HGP", 10))  # with pushes per round
LINKS = 3  # k of the k-out graphs on which the number of clients grows
WIDTH = 6  # parameters there
FEW = 12  # number of clients that is enough for mixing by edges, as with many clients
SHORT = 2  # number of rounds that is enough to see the peak, which does not grow with it
ByRounds = Callable[[int], Float[Array, "n d"]]


@dataclass(frozen=True)
class Rounds:
    """Time of a round, against a Python loop and by number of clients."""

    clients: tuple[int, ...] = option((3, 100, 1000), "numbers of clients to compare at", 2)
    widths: tuple[int, ...] = option((6, 1000), "numbers of parameters to compare at", 2)
    examples: int = option(10, "examples per client", 1)
    growth_clients: tuple[int, ...] = option(
        (100, 1_000, 10_000, 100_000), "numbers of clients on k-out graphs, from few to many", FEW
    )
    seconds: float = option(0.5, "approximate seconds of one measurement", 1e-6)
    repeats: int = option(5, "measurements of which the median is taken", 1)
    seed: int = option(0, "seed of the data and the networks", 0)


def run(config: Rounds) -> dict[str, Any]:
    """Compare with the loop, then let the number of clients grow."""
    where = machine()
    sizes = product(config.widths, config.clients, METHODS)
    cases = [partial(compare, config, clients, width, *method) for width, clients, method in sizes]
    rows = measure_rows("µs per round on random-directed networks", cases)
    growth = measure_rows(f"SGP on {LINKS}-out graphs", _growth_cases(config))
    return {"rounds": rows, "growth": growth, "machine": where}


def sgp(task: hp.Task, network: Network, key: PRNGKeyArray, step_size: float) -> ByRounds:
    """`loop.sgp` on the engine `Simulate`."""
    return lambda rounds: jax.block_until_ready(hp.train(task, hp.SGP(rounds, step_size), network, key=key).params)


def hgp(task: hp.Task, network: Network, key: PRNGKeyArray, pushes: int, step_size: float) -> ByRounds:
    """`loop.hgp` on the engine `Simulate`."""

    def run(steps: int) -> Float[Array, "n d"]:
        return jax.block_until_ready(hp.hypergradient(task, hp.HGP(steps, pushes, step_size), network, key=key).value)

    return run


def compare(config: Rounds, clients: int, width: int, method: str, pushes: int) -> list[Row]:
    """Compare the engine with the loop, which must compute the same."""
    key, step = jax.random.key(config.seed), 1 / width  # the costs' curvature grows with the width
    task = hp.tasks.logistic(clients, config.seed, examples=config.examples, features=width - 1)
    network = hp.networks.RandomDirected(clients, seed=config.seed)
    if method == "SGP":
        both = [make(task, network, key, step) for make in (sgp, loop.sgp)]
    else:
        # At the start, zero, the hypergradient is zero and cannot be compared.
        trained = task.at(params=sgp(task, network, key, step)(CHECKED))
        both = [make(trained, network, key, pushes, step) for make in (hgp, loop.hgp)]
    require_same(f"{method}, {clients} clients, width {width}", *(each(CHECKED) for each in both))
    ours, theirs = per_round(both, config.seconds, config.repeats)
    size = {"method": method, "pushes": pushes, "clients": clients, "width": width, "examples": config.examples}
    return [size | {"microseconds": ours * 1e6, "loop_microseconds": theirs * 1e6, "ratio": theirs / ours}]


def require_same(what: str, ours: Array | np.ndarray, theirs: Array | np.ndarray) -> None:
    """Refuse to compare the speed of computations whose results differ."""
    difference = np.max(np.abs(ours - theirs)) / np.max(np.abs(theirs))
    if not difference <= TOLERANCE:
        raise HyperpushError(f"{what}: engine and loop differ by {difference:.1e}, relative; nothing was measured")


def _growth_cases(config: Rounds) -> list[Callable[[], list[Row]]]:
    """Return a case for every number of clients on k-out graphs, each in a separate process."""
    before: list[tuple[float, float]] = []  # clients and seconds of the cases measured so far
    base: list[float | None] = []  # memory of a process with few clients

    def grow(clients: int) -> list[Row]:
        if not base:
            base.append(in_new_process(measure, config, FEW)[1])
        seconds, peak = in_new_process(measure, config, clients)
        row = growth_row(clients, seconds, peak, base[0], before[-1] if before else None)
        before.append((clients, seconds))
        return [row]

    return [partial(grow, clients) for clients in config.growth_clients]


def measure(config: Rounds, clients: int) -> tuple[float, float | None]:
    """Return seconds per round, and the peak of resident memory of a run in megabytes."""
    task = hp.tasks.logistic(clients, config.seed, examples=config.examples, features=WIDTH - 1)
    work = sgp(task, hp.networks.KOut(clients, LINKS), jax.random.key(config.seed), 1 / WIDTH)
    work(SHORT)  # compiles, which takes more memory than small networks do
    peak = peak_megabytes(lambda: work(SHORT))
    return per_round([work], config.seconds, config.repeats)[0], peak


def growth_row(
    clients: int, seconds: float, peak: float | None, base: float | None, before: tuple[float, float] | None
) -> Row:
    """Return a row with memory beyond `base`, and the exponent of time's growth since `before` (clients, seconds)."""
    return {
        "clients": clients,
        "microseconds": seconds * 1e6,
        "peak_megabytes": None if peak is None or base is None else max(0.0, peak - base),
        "per_client_nanoseconds": seconds * 1e9 / clients,
        "exponent": None if before is None else exponent(before, (clients, seconds)),
    }


if __name__ == "__main__":
    main(Rounds, run)
