"""Time and memory of SGP on k-out graphs, each size in a process of its own."""

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

from hyperpush.bench.timing import exponent

LINKS = 3  # k
FEW = 12  # clients: enough for their messages to be mixed by edges, as those of many are
ROUNDS = 2  # enough to see the peak, which does not grow with the number of rounds


def measure(
    clients: int, width: int, examples: int, seed: int, seconds: float, repeats: int
) -> tuple[float, float | None]:
    """Seconds per round, and megabytes of memory resident at the peak of a run."""
    import jax

    from hyperpush.bench import simulated
    from hyperpush.bench.timing import peak_megabytes, per_round
    from hyperpush.networks import KOut
    from hyperpush.tasks.logistic import logistic

    task = logistic(clients, seed, examples=examples, features=width - 1)
    sgp = simulated.sgp(task, KOut(clients, LINKS), jax.random.key(seed), 1 / width)
    sgp(ROUNDS)  # compiles, which takes more memory than small networks do
    peak = peak_megabytes(lambda: sgp(ROUNDS))
    return per_round([sgp], seconds, repeats)[0], peak


def alone(*arguments: Any) -> tuple[float, float | None]:
    """`measure` in a fresh process, in which nothing that ran before has left memory behind."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        return process.submit(measure, *arguments).result()


def rows(clients: Sequence[int], measured: Sequence[tuple[float, float | None]], base: float | None) -> list[dict]:
    """One row for each number of clients; memory beyond `base`, growth as the exponent of time since the row before."""
    made = []
    for place, (n, (seconds, peak)) in enumerate(zip(clients, measured, strict=True)):
        before = (clients[place - 1], measured[place - 1][0]) if place else None
        made.append(
            {
                "clients": n,
                "microseconds": seconds * 1e6,
                "peak_megabytes": None if peak is None or base is None else max(0.0, peak - base),
                "per_client_nanoseconds": seconds * 1e9 / n,
                "exponent": exponent(before, (n, seconds)) if before else None,
            }
        )
    return made
