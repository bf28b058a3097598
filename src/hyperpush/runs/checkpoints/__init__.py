"""Checkpoints let interrupted runs continue: `store` reads and writes them, `journal` decides what they contain."""

from dataclasses import dataclass

MINUTES, KEEP = 2.0, 3  # defaults of `Policy`


@dataclass(frozen=True)
class Policy:
    """Rule for checkpoints: the time or the rounds between two checkpoints, and the number of checkpoints to keep."""

    minutes: float | None = MINUTES  # None writes checkpoints by rounds only
    rounds: int | None = (
        None  # communication rounds, or iterations of loops without communication; None: by minutes only
    )
    keep: int = KEEP
