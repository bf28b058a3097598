"""How long a round takes: against a loop over clients in Python, and as the number of clients grows."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

import hyperpush as hp
from hyperpush.bench import loop
from hyperpush.bench.config import Rounds
from hyperpush.bench.timing import exponent, in_new_process, machine, peak_megabytes, per_round, show
from hyperpush.errors import HyperpushError
from hyperpush.networks import Network
from hyperpush.runs.report.figures import panels
from hyperpush.runs.run import StudyRun

TOLERANCE = 1e-4
WIDE = 100  # parameters, above which many examples would only fill the memory
CHECKED = 5  # rounds after which engine and loop must agree
LINKS = 3  # k of the k-out graphs on which the number of clients grows
FEW = 12  # clients: enough for their messages to be mixed by edges, as those of many are
SHORT = 2  # rounds: enough to see the peak, which does not grow with their number
Measured = tuple[float, float | None]  # seconds per round, megabytes at the peak
ByRounds = Callable[[int], Float[Array, "n d"]]


def run(config: Rounds, run: StudyRun) -> dict[str, Any]:
    """Compare with the loop, then let the number of clients grow."""
    where = machine()
    return {"rounds": compare(config, run), "growth": grow(config, run), "machine": where}


def sgp(task: hp.Task, network: Network, key: PRNGKeyArray, step_size: float) -> ByRounds:
    """`loop.sgp` on the engine `Simulate`."""
    return lambda rounds: jax.block_until_ready(hp.train(task, hp.SGP(rounds, step_size), network, key=key).params)


def hgp(task: hp.Task, network: Network, key: PRNGKeyArray, pushes: int, step_size: float) -> ByRounds:
    """`loop.hgp` on the engine `Simulate`."""

    def run(steps: int) -> Float[Array, "n d"]:
        return jax.block_until_ready(hp.hypergradient(task, hp.HGP(steps, pushes, step_size), network, key=key).value)

    return run


def compare(config: Rounds, run: StudyRun) -> list[dict[str, Any]]:
    """A row for every size and method: the engine and the loop, which must compute the same."""
    key = jax.random.key(config.seed)
    methods = [("SGP", 1), *(("HGP", pushes) for pushes in config.pushes)]
    sizes = [
        (clients, width, examples)
        for width in config.widths
        for examples in (config.examples if width <= WIDE else config.examples[:1])
        for clients in config.clients
    ]
    rows = []
    with run.progress("comparison", len(sizes) * len(methods)) as bar:
        for clients, width, examples in sizes:
            task = hp.tasks.logistic(clients, config.seed, examples=examples, features=width - 1)
            network = hp.networks.RandomDirected(clients, seed=config.seed)
            step = 1 / width  # the costs' curvature grows with the width
            # At zero, where the task starts, its hypergradient is zero: nothing to compare.
            trained = task.at(params=sgp(task, network, key, step)(CHECKED))
            for method, pushes in methods:
                if method == "SGP":
                    timed = [make(task, network, key, step) for make in (sgp, loop.sgp)]
                else:
                    timed = [make(trained, network, key, pushes, step) for make in (hgp, loop.hgp)]
                require_same(f"{method}, {clients} clients, width {width}", *(each(CHECKED) for each in timed))
                ours, theirs = per_round(timed, config.seconds, config.repeats)
                size = {"method": method, "pushes": pushes, "clients": clients, "width": width, "examples": examples}
                times = {"microseconds": ours * 1e6, "loop_microseconds": theirs * 1e6, "ratio": theirs / ours}
                rows.append(size | times)
                run.record(**rows[-1])
                bar.advance()
    show(run, "µs per round on random-directed networks", rows)
    return rows


def require_same(what: str, ours: Any, theirs: Any) -> None:
    """Refuse to compare the speed of computations whose results differ."""
    difference = np.max(np.abs(ours - theirs)) / np.max(np.abs(theirs))
    if not difference <= TOLERANCE:
        raise HyperpushError(f"{what}: engine and loop differ by {difference:.1e}, relative; nothing was measured")


def grow(config: Rounds, run: StudyRun) -> list[dict[str, Any]]:
    """A row for every number of clients on k-out graphs, each in a process of its own."""
    if not config.growth_clients:
        return []
    options = (config.growth_width, config.examples[0], config.seed, config.seconds, config.repeats)
    measured = []
    with run.progress("growth", 1 + len(config.growth_clients)) as bar:
        # What every process holds, however few its clients.
        _, base = in_new_process(measure, FEW, *options)
        bar.advance()
        for clients in config.growth_clients:
            measured.append(in_new_process(measure, clients, *options))
            bar.advance()
    rows = growth_rows(config.growth_clients, measured, base)
    for row in rows:
        run.record(**row)
    show(run, f"SGP on {LINKS}-out graphs", rows)
    draw_growth(run, rows)
    return rows


def measure(clients: int, width: int, examples: int, seed: int, seconds: float, repeats: int) -> Measured:
    """Seconds per round, and megabytes of memory resident at the peak of a run."""
    task = hp.tasks.logistic(clients, seed, examples=examples, features=width - 1)
    timed = sgp(task, hp.networks.KOut(clients, LINKS), jax.random.key(seed), 1 / width)
    timed(SHORT)  # compiles, which takes more memory than small networks do
    peak = peak_megabytes(lambda: timed(SHORT))
    return per_round([timed], seconds, repeats)[0], peak


def growth_rows(clients: Sequence[int], measured: Sequence[Measured], base: float | None) -> list[dict[str, Any]]:
    """One row for each number of clients; memory beyond `base`, growth as the exponent of time since the row before."""
    rows, before = [], None
    for n, (seconds, peak) in zip(clients, measured, strict=True):
        rows.append(
            {
                "clients": n,
                "microseconds": seconds * 1e6,
                "peak_megabytes": None if peak is None or base is None else max(0.0, peak - base),
                "per_client_nanoseconds": seconds * 1e9 / n,
                "exponent": exponent(before, (n, seconds)) if before else None,
            }
        )
        before = n, seconds
    return rows


def draw_growth(run: StudyRun, rows: Sequence[dict[str, Any]]) -> None:
    """Time and memory by number of clients, beside what grows in proportion."""
    figure, axes = panels(2)
    labels = {"microseconds": "µs per SGP round", "peak_megabytes": "peak memory in MB"}
    for axis, (name, label) in zip(axes, labels.items(), strict=True):
        known = [(row["clients"], row[name]) for row in rows if row[name]]
        if known:
            x, y = zip(*known, strict=True)
            axis.loglog(x, y, marker="o", label="measured")
            # Through the largest size, because fixed costs hide the slope at small ones.
            axis.loglog(x, [y[-1] * n / x[-1] for n in x], linestyle=":", color="gray", label="linear")
            axis.legend()
        axis.set_xlabel("clients")
        axis.set_ylabel(label)
    run.figure("growth", figure)
