"""Measurements of a case in one process: compilations, program lines, CPU and wall seconds, and peak memory."""

import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import jax
from script import Row

from hyperpush.engines.compiled.compile import counting

COMPILED = "/jax/core/compile/backend_compile_duration"


def first(work: Callable[[], Any]) -> Row:
    """Run once, with compilation, and return the measurements. Memory is the peak of the whole process."""
    seen: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(lambda event, *_, **__: seen.append(event))
    with counting() as counts:
        wall, cpu = time.perf_counter(), time.process_time()
        jax.block_until_ready(work())
        taken = {"cpu_seconds": time.process_time() - cpu, "seconds": time.perf_counter() - wall}
    return {"compilations": seen.count(COMPILED), "lines": counts.lines, **taken, "peak_megabytes": peak()}


def later(work: Callable[[], Any], times: int = 7) -> tuple[float, float]:
    """Return the median wall and CPU seconds of calls after the first two."""
    found = []
    for _ in range(times + 2):
        wall, cpu = time.perf_counter(), time.process_time()
        jax.block_until_ready(work())
        found.append((time.perf_counter() - wall, time.process_time() - cpu))
    return median(each[0] for each in found[2:]), median(each[1] for each in found[2:])


def per_step(run: Callable[[int], Any], short: int = 4, long: int = 12, times: int = 3) -> tuple[float, float]:
    """Return wall and CPU seconds of one step: a long run without a short one, divided by their difference."""
    few, many = (later(lambda steps=steps: run(steps), times) for steps in (short, long))
    return tuple((b - a) / (long - short) for a, b in zip(few, many, strict=True))  # type: ignore[return-value]


def peak() -> float | None:
    """Return the peak of this process's resident memory in MB; None if the system does not report it (not Linux)."""
    status = Path("/proc/self/status")
    if not status.is_file():
        return None
    return next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmHWM")) / 1024
