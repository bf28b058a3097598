"""Selection by validation scores, and statistics of scores over seeds."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
from scipy.stats import t


class Interval(NamedTuple):
    """Mean of n values, with a confidence interval for the expected value; the interval is None for n = 1."""

    mean: float
    sd: float | None  # standard deviation with n − 1; None for n = 1
    low: float | None
    high: float | None
    n: int


def interval(values: Sequence[float], level: float = 0.95) -> Interval:
    """Return Student's interval mean ± t_{(1+level)/2, n−1}·sd/√n (Student 1908), exact for normal values."""
    n, mean = len(values), float(np.mean(values))
    if n < 2:
        return Interval(mean, None, None, None, n)
    sd = float(np.std(values, ddof=1))
    half = float(t.ppf((1 + level) / 2, n - 1)) * sd / n**0.5
    return Interval(mean, sd, mean - half, mean + half, n)


def choose(scores: Sequence[Sequence[float | None]], better: Literal["higher", "lower"]) -> int | None:
    """Return the index of the row with the best mean, the first of equal rows; skip rows with a missing score.

    It is None if every row has a missing score.
    """
    means = {place: mean for place, row in enumerate(scores) if (mean := mean_of(row)) is not None}
    return (max if better == "higher" else min)(means, key=means.__getitem__, default=None)


def mean_of(row: Sequence[float | None]) -> float | None:
    """Return the mean; None without values, or if one is missing."""
    known = [score for score in row if score is not None]
    return float(np.mean(known)) if known and len(known) == len(row) else None
