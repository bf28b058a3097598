"""Interrupted runs that continue: what is kept on disk (`store`), and what of a run (`journal`)."""

from dataclasses import dataclass

MINUTES, KEEP = 2.0, 3  # unless somebody asks for others


@dataclass(frozen=True)
class Policy:
    """When to write checkpoints, and how many to keep."""

    minutes: float | None = MINUTES
    rounds: int | None = None  # exchanges, or iterations of loops without any
    keep: int = KEEP
