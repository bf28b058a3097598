"""Define the signals after which a process writes a checkpoint and ends."""

import signal
from types import FrameType

# Sent by Ctrl-C, by a scheduler, and by a terminal that was closed (SIGHUP does not exist on Windows).
NAMES = ("SIGINT", "SIGTERM", "SIGHUP")


def stop_signals() -> list[signal.Signals]:
    """Return the signals that stop a run, except those that this process ignores (as under `nohup`)."""
    found = [getattr(signal, name) for name in NAMES if hasattr(signal, name)]
    return [number for number in found if signal.getsignal(number) is not signal.SIG_IGN]


def in_collector(frame: FrameType | None) -> bool:
    """Return True if a signal has interrupted JAX's callback of the garbage collector, where Python drops errors."""
    return frame is not None and frame.f_code.co_name == "_xla_gc_callback"
