"""Interrupted runs that continue: checkpoints on disk (`store`), and the kept parts of a run (`journal`)."""

from dataclasses import dataclass

MINUTES, KEEP = 2.0, 3  # defaults


@dataclass(frozen=True)
class Policy:
    """Rule for checkpoints: the time or rounds between them, and the number to keep."""

    minutes: float | None = MINUTES
    rounds: int | None = None  # exchanges, or iterations of loops without any
    keep: int = KEEP
