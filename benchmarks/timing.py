"""Wall-clock time of repeated work, peak memory, and rows of measurements as a table."""

import os
import platform
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
from math import ceil, log
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import track
from script import Row, show

T = TypeVar("T")
Task = Callable[[int], Any]  # runs a number of rounds and waits for their result

_FIRST = 2
_GROWTH = 100


def measure_rows(title: str, cases: Sequence[Callable[[], list[Row]]]) -> list[Row]:
    """Measure case by case, and show all rows as a table unless there are none."""
    console = Console(stderr=True)
    rows = [row for measure in track(cases, title, console=console, transient=True) for row in measure()]
    if rows:
        columns = [name.replace("megabytes", "MB").replace("microseconds", "µs").replace("_", " ") for name in rows[0]]
        show(title, columns, [list(row.values()) for row in rows])
    return rows


def per_round(tasks: Sequence[Task], seconds: float, repeats: int) -> list[float]:
    """Return seconds per round of each task: the median of `repeats` runs that last about `seconds` each.

    The tasks take turns, so that other work on the machine slows all of them alike. Compilation is not measured; other
    work that a run does once is spread over its rounds.
    """
    lengths = [_length(task, seconds) for task in tasks]
    times = [[_seconds(task, length) for task, length in zip(tasks, lengths, strict=True)] for _ in range(repeats)]
    return [median(own) / length for own, length in zip(zip(*times, strict=True), lengths, strict=True)]


def peak_megabytes(task: Callable[[], Any]) -> float | None:
    """Return the peak of resident memory while `task` runs; None if the system does not report it (not Linux)."""
    # Not getrusage: its peak cannot be restarted, and a new process inherits that of its parent.
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        task()
        return None
    task()
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith("VmHWM:")) / 1024


def exponent(before: tuple[float, float], now: tuple[float, float]) -> float:
    """Return the exponent of the growth of time between two pairs (size, seconds); 1 means in proportion."""
    return log(now[1] / before[1]) / log(now[0] / before[0])


def in_new_process(function: Callable[..., T], *arguments: Any) -> T:
    """Run a function in a new process, free of memory left by earlier work, and return its result."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        return process.submit(function, *arguments).result()


def machine() -> dict[str, Any]:
    """Return facts about the machine that affect the numbers."""
    return {
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],  # processes that wanted a core in the last minute: near 0 on an idle machine
        "system": platform.system(),
        "architecture": platform.machine(),
        "python": platform.python_version(),
        "jax": version("jax"),
    }


def _length(task: Task, seconds: float) -> int:
    """Return the number of rounds that last about `seconds`; afterwards all code of such a run is compiled."""
    length = _FIRST
    while True:
        task(length)
        taken = _seconds(task, length)
        if taken >= seconds / 2:
            return length
        length = ceil(length * min(_GROWTH, seconds / taken))


def _seconds(task: Task, rounds: int) -> float:
    began = time.perf_counter()
    task(rounds)
    return time.perf_counter() - began
