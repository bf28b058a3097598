"""An attack on a privacy claim: it tries to tell two adjacent data sets apart from the messages."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import jax
import numpy as np
from jaxtyping import Array, Float, Key
from scipy.stats import beta

from hyperpush.base import panels
from hyperpush.base.checks import check_integer
from hyperpush.base.errors import InvalidInput
from hyperpush.base.panels import Panel, Pictured
from hyperpush.privacy import ASSUMPTION

Runs = Callable[[Key[Array, " n"]], Any]

BINS = 100  # of the histogram of every observable
THRESHOLDS = 400


@dataclass(frozen=True)
class Audit(Pictured):
    """A lower bound on ε that holds with probability `confidence`, and the event that shows it.

    `hp.privacy.audit_epsilon` returns it. `assumes` states the assumption behind claimed ε. The attack does not list
    the representable draws of noise, so it does not detect leaks through them.

    Args:
        lower: The lower bound on ε.
        confidence: Probability that the bound holds.
        trials: Number of runs.
        event: The event in words.
        rates: Rate of the event with each data set, the larger first.

    Example:
        >>> import hyperpush as hp
        >>> hp.privacy.Audit(1.3, 0.95, 1000, "score ≥ 2", (0.4, 0.1)).refutes(1.0)
        True
    """

    assumes: ClassVar[str] = ASSUMPTION

    lower: float
    confidence: float
    trials: int
    event: str
    rates: tuple[float, float]

    def refutes(self, claim: float) -> bool:
        """Return True if a claimed ε is too small to be true."""
        return self.lower > claim

    def panels(self) -> list[Panel]:
        """Return the report's panels: the bound in words, and the rates of the event with their intervals."""
        judged, miss = self.trials // 2, (1 - self.confidence) / 2
        counts = np.round(np.multiply(self.rates, judged))
        ends = {side: {"": clopper_pearson(counts, judged, miss, side)} for side in ("lower", "upper")}
        said = [
            f"ε is at least {self.lower:.3g}, with probability {100 * self.confidence:g} %.",
            "It refutes smaller claims. A claim that is not refuted may still be wrong.",
        ]
        return [
            panels.text("Lower bound on ε", *said, note=self.assumes),
            panels.bars(
                "How often the event occurs",
                ["one data set", "the other"],
                {"": self.rates},
                low=ends["lower"],
                high=ends["upper"],
                y_label="share of the runs",
                note=f"Event: {self.event}. {judged:,} runs per data set; intervals of Clopper and Pearson.",
            ),
        ]


def audit_epsilon(
    run_a: Runs,
    run_b: Runs,
    trials: int,
    confidence: float = 0.95,
    delta: float = 0.0,
    seed: int = 0,
    chunk: int | None = None,
) -> Audit:
    """Attack a claim of privacy: bound ε from below by how well two adjacent data sets can be told apart.

    Every event gives a bound for two adjacent data sets a and b:

        ε ≥ log((P(event | a) − δ) / P(event | b))

    The event is a score above or below a threshold, likelier under either data set. The attack chooses the event with
    the largest bound on one half of the trials, and judges it on the other half. The intervals of Clopper and Pearson
    (1934) bound both probabilities, each with half of 1 − `confidence` (Jagielski, Ullman and Oprea,
    arXiv:2006.07709).

    **Use it** to find mistakes: noise that is missing, reused or too small. **Avoid it** as a proof: a bound below the
    claim does not show that the claim is true.

    Args:
        run_a: Function of an array of keys, one per trial. It returns one score per trial, or a vector of all observed
            numbers. Vectors become a score Σ log(p_a/p_b) with densities from histograms of the first half.
        run_b: The same function on data that differ in one example of one client.
        trials: Number of runs, at least 100. The largest ε that can be shown is about log(trials/4).
        confidence: Probability that the bound holds, at least 0.5 and below 1.
        delta: δ of the claim, at least 0 and below 1; 0 for pure ε.
        seed: Seed of the keys.
        chunk: Keys per call, at least 1; None passes all at once.

    Raises:
        InvalidInput: An option is out of range, or a run does not return scores.

    Example:
        Laplace noise of scale 1 on numbers that differ by 1 has ε = 1.

        >>> import jax
        >>> import hyperpush as hp
        >>> def run(mean):
        ...     return lambda keys: mean + jax.vmap(jax.random.laplace)(keys)
        >>> found = hp.privacy.audit_epsilon(run(0.0), run(1.0), trials=20_000)
        >>> print(0.8 < found.lower < 1.0, found.refutes(0.5), found.refutes(1.0))
        True True False
    """
    half = check_integer("trials", trials, minimum=100) // 2
    for field, given, least in (("confidence", confidence, 0.5), ("delta", delta, 0.0)):
        if not least <= given < 1:
            raise InvalidInput(field, given, f"a number from {least} to 1, without 1")
    chunk = 2 * half if chunk is None else check_integer("chunk", chunk, minimum=1)
    keys = jax.random.split(jax.random.key(seed), (2, 2 * half))
    a, b = (_observe(field, run, keys[i], chunk) for i, (field, run) in enumerate((("run_a", run_a), ("run_b", run_b))))
    if a.shape != b.shape:
        raise InvalidInput("run_b", f"observables of shape {b.shape}", f"those of run_a: {a.shape}")
    score = _likelihood_ratio(a[:half], b[:half])
    a, b = score(a), score(b)
    miss = (1 - confidence) / 2
    thresholds = np.unique(np.quantile(np.concatenate([a[:half], b[:half]]), np.linspace(0, 1, THRESHOLDS)))
    counts = [_counts(scores[:half], thresholds) for scores in (a, b)]
    # Choose by bounds that hold for all candidates at once; otherwise rare events would win by luck.
    strict = miss / (4 * len(thresholds))
    gains = np.stack([_lower(counts[i], counts[1 - i], half, strict, delta) for i in (0, 1)])
    likelier, tail, place = np.unravel_index(np.argmax(gains), gains.shape)
    seen = [int(_counts(scores[half:], thresholds[place : place + 1])[tail, 0]) for scores in (a, b)]
    if likelier == 1:
        seen.reverse()
    lower = float(_lower(np.array(seen[0]), np.array(seen[1]), half, miss, delta))
    event = f"score {'≥' if tail == 0 else '≤'} {thresholds[place]:.6g}, likelier under {'ab'[likelier]}"
    return Audit(lower, confidence, 2 * half, event, (seen[0] / half, seen[1] / half))


def clopper_pearson(count: Any, trials: int, miss: float, side: Literal["lower", "upper"]) -> Any:
    """Return a bound on a probability from `count` hits in `trials`; it fails with probability at most `miss`."""
    count = np.asarray(count, float)
    if side == "lower":
        return np.where(count > 0, beta.ppf(miss, np.maximum(count, 1), trials - count + 1), 0.0)
    return np.where(count < trials, beta.ppf(1 - miss, count + 1, np.maximum(trials - count, 1)), 1.0)


def _lower(often: Any, seldom: Any, trials: int, miss: float, delta: float) -> Any:
    """Return the lower bound on ε, at least 0, from the counts of an event under both data sets."""
    above = clopper_pearson(often, trials, miss, "lower") - delta
    below = clopper_pearson(seldom, trials, miss, "upper")
    return np.log(np.maximum(above, below) / below)


def _counts(scores: Float[np.ndarray, " n"], thresholds: Float[np.ndarray, " k"]) -> Any:
    """Return the numbers of scores that are ≥ (row 0) and ≤ (row 1) each threshold."""
    ordered = np.sort(scores)
    at_least = len(ordered) - np.searchsorted(ordered, thresholds, side="left")
    return np.stack([at_least, np.searchsorted(ordered, thresholds, side="right")])


def _observe(field: str, run: Runs, keys: Key[Array, " n"], chunk: int) -> Float[np.ndarray, " n *k"]:
    parts = []
    for start in range(0, len(keys), chunk):
        some = keys[start : start + chunk]
        part = np.asarray(run(some), float)
        if part.ndim not in (1, 2) or len(part) != len(some):
            raise InvalidInput(field, f"an answer of shape {part.shape}", f"{len(some)} scores or vectors, one per key")
        if not np.all(np.isfinite(part)):
            raise InvalidInput(field, "NaN or infinity", "finite numbers")
        parts.append(part)
    return np.concatenate(parts)


def _likelihood_ratio(a: np.ndarray, b: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    """Return a function that scores runs: by a single observable itself, or by a sum of log likelihood ratios.

    Histograms of the observables in `a` and `b` estimate the ratios.
    """
    if a.ndim == 1 or a.shape[1] == 1:
        return lambda values: values.reshape(len(values))
    edges, ratios = [], []
    for of_a, of_b in zip(a.T, b.T, strict=True):
        inner = np.unique(np.quantile(np.concatenate([of_a, of_b]), np.linspace(0, 1, BINS + 1)[1:-1]))
        counts = [np.bincount(np.searchsorted(inner, part), minlength=len(inner) + 1) for part in (of_a, of_b)]
        edges.append(inner)
        ratios.append(np.log((counts[0] + 1) / (counts[1] + 1)))

    def score(values: np.ndarray) -> np.ndarray:
        columns = zip(edges, ratios, values.T, strict=True)
        return np.sum([ratio[np.searchsorted(edge, column)] for edge, ratio, column in columns], axis=0)

    return score
