"""Verdicts on paired loss differences: *helps*, *hurts* or *cannot say*, corrected for many comparisons."""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from jaxtyping import Bool, Float
from scipy import stats

Verdict = Literal["helps", "hurts", "cannot say"]
ROUNDING = 1e-9  # differences below this share of the mean loss may come from the solvers
POWER = 0.8  # probability of detecting the smallest visible harm


@dataclass(frozen=True)
class Tests:
    """Results of tests that are corrected together for many comparisons, in the given order.

    Attributes:
        gain: Mean loss differences; positive helps.
        low: Lower ends of the intervals.
        high: Upper ends of the intervals.
        p: Two-sided p-values of paired t-tests, corrected by Benjamini and Yekutieli.
        visible: The smallest difference that such a test would detect in four of five cases.
        verdicts: The verdicts in words.
    """

    gain: Float[np.ndarray, " tests"]
    low: Float[np.ndarray, " tests"]
    high: Float[np.ndarray, " tests"]
    p: Float[np.ndarray, " tests"]
    visible: Float[np.ndarray, " tests"]
    verdicts: tuple[Verdict, ...]

    def row(self, place: int) -> dict[str, Any]:
        """Return the result of one test, as fields for a row of the audit's result."""
        numbers = {name: float(getattr(self, name)[place]) for name in ("gain", "low", "high", "p")}
        return {**numbers, "verdict": self.verdicts[place]}


def judge(sums: Float[np.ndarray, "tests 3"], level: float, unit: float = 0.0) -> Tests:
    """Test loss differences, and correct all tests together for many comparisons.

    For R rejections among m tests, intervals have confidence 1 − level·max(R, 1)/(m·Σ_{k ≤ m} 1/k). So they exclude 0
    exactly for verdicts other than *cannot say*.

    Args:
        sums: For each test the sum of the differences, the sum of their squares, and their number, at least 2.
        level: The share of false claims to accept among all claims.
        unit: The typical size of the losses. Differences as small as its rounding errors count as 0.
    """
    total, squares, records = np.asarray(sums, np.float64).T
    gain, freedom = total / records, records - 1
    nothing = squares <= records * (ROUNDING * unit) ** 2
    gain = np.where(nothing, 0, gain)
    error = np.sqrt(np.maximum(squares / records - gain**2, 0) / freedom)
    error = np.where(nothing, 0, error)
    ratio = np.divide(np.abs(gain), error, out=np.where(gain == 0, 0.0, np.inf), where=error > 0)
    p = stats.false_discovery_control(2 * stats.t.sf(ratio, freedom), method="by")
    claims = p <= level
    alpha = level / (len(p) * np.sum(1 / np.arange(1, len(p) + 1)))
    width = error * stats.t.isf(alpha * max(int(claims.sum()), 1) / 2, freedom)
    visible = error * (stats.t.isf(alpha / 2, freedom) + stats.t.isf(1 - POWER, freedom))
    return Tests(gain, gain - width, gain + width, p, visible, _words(gain, claims))


def _words(gain: np.ndarray, claims: Bool[np.ndarray, " tests"]) -> tuple[Verdict, ...]:
    return tuple(
        "cannot say" if not claim else "helps" if each > 0 else "hurts"
        for each, claim in zip(gain, claims, strict=True)
    )


def area_under_curve(scores: np.ndarray, labels: np.ndarray) -> float | None:
    """Return the area under the ROC curve: the share of pairs (positive, negative record) in the right order.

    It is None without such pairs.
    """
    positive = labels == 1
    pairs = int(positive.sum()) * int((~positive).sum())
    if not pairs:
        return None
    ranks = stats.rankdata(scores)[positive]
    return float((ranks.sum() - len(ranks) * (len(ranks) + 1) / 2) / pairs)
