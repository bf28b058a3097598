"""Signals that end a process after its checkpoint."""

import signal
from types import FrameType

NAMES = ("SIGINT", "SIGTERM", "SIGHUP")  # Ctrl-C; a scheduler; a terminal that was closed (not on Windows)


def stop_signals() -> list[signal.Signals]:
    """Return the signals that stop a run, except those that this process ignores (as under `nohup`)."""
    found = [getattr(signal, name) for name in NAMES if hasattr(signal, name)]
    return [number for number in found if signal.getsignal(number) is not signal.SIG_IGN]


def in_collector(frame: FrameType | None) -> bool:
    """True if a signal has interrupted JAX's callback of the garbage collector, in which errors are lost."""
    return frame is not None and frame.f_code.co_name == "_xla_gc_callback"
