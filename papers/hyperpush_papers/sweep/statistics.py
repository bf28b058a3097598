"""Choice on validation scores, and statistics of scores over seeds."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
from scipy.stats import t


class Interval(NamedTuple):
    """The mean of n values, and an interval for the mean of their distribution; without it for n = 1."""

    mean: float
    sd: float | None  # with n − 1
    low: float | None
    high: float | None
    n: int


def interval(values: Sequence[float], level: float = 0.95) -> Interval:
    """Student's interval mean ± t_{(1+level)/2, n−1}·sd/√n (Student 1908): exact for normal values."""
    n, mean = len(values), float(np.mean(values))
    if n < 2:
        return Interval(mean, None, None, None, n)
    sd = float(np.std(values, ddof=1))
    half = float(t.ppf((1 + level) / 2, n - 1)) * sd / n**0.5
    return Interval(mean, sd, mean - half, mean + half, n)


def choose(scores: Sequence[Sequence[float | None]], better: Literal["higher", "lower"]) -> int | None:
    """The row with the best mean, the first of equal ones; rows with a missing score are out. None: all are."""
    means = {place: mean for place, row in enumerate(scores) if (mean := mean_of(row)) is not None}
    return (max if better == "higher" else min)(means, key=means.__getitem__, default=None)


def mean_of(row: Sequence[float | None]) -> float | None:
    """The mean; None if there is nothing, or something is missing."""
    known = [score for score in row if score is not None]
    return float(np.mean(known)) if known and len(known) == len(row) else None
