"""Interrupted runs that continue: what is kept on disk (`store`), and what of a run (`journal`)."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Policy:
    """When to write checkpoints, and how many to keep."""

    minutes: float | None = 2.0
    rounds: int | None = None  # exchanges, or iterations of loops without any
    keep: int = 3
