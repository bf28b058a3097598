"""Set up JAX in this process for a run, and measure the time of compilation and the memory in use."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import jax

from hyperpush.base.settings import keep_compiled_code


class _CompileTime:
    """Seconds of compilation by JAX since the first run of this process."""

    def __init__(self):
        self.seconds = 0.0
        jax.monitoring.register_event_duration_secs_listener(self._add)

    def _add(self, event: str, duration_secs: float, **_: object) -> None:
        if event.endswith("backend_compile_duration"):
            self.seconds += duration_secs


compile_time = cache(_CompileTime)  # one per process: JAX keeps every listener


@contextmanager
def set_up_jax(precision: str | None) -> Iterator[None]:
    """Keep compiled code on disk between runs, and set the precision for the block.

    `precision` is `"float32"` or `"float64"`; None keeps JAX's setting.
    """
    keep_compiled_code()
    compile_time()
    before = jax.config.read("jax_enable_x64")
    if precision is not None:
        jax.config.update("jax_enable_x64", precision == "float64")
    try:
        yield
    finally:
        jax.config.update("jax_enable_x64", before)


def resident_megabytes() -> float:
    """Return the resident memory of this process; 0 if the system does not report it (not Linux)."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
    except (OSError, ValueError):
        return 0.0
