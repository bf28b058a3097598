"""Scale features to mean 0 and deviation 1, by averages that the parties compute together; no rows are pooled."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from hyperpush.base.status import Status
from hyperpush.networks import Network
from hyperpush.verbs.average import average
from hyperpush.verbs.costs import Costs

CONSTANT = 1e-10  # a feature whose deviation is below this share of its mean counts as constant


@dataclass(frozen=True)
class Scaling:
    """Means and deviations that all parties share, and the costs of computing them.

    Attributes:
        mean: The mean of each feature over the training rows in which it is present.
        deviation: The deviation of each feature, where missing values count as the mean; 0 for constant features.
        label: Mean and deviation of the label; (0, 1) for classes.
        rows: Number of training rows of all parties.
        costs: Costs of the averages.
        status: Status of the averages.
    """

    mean: np.ndarray
    deviation: np.ndarray
    label: tuple[float, float]
    rows: float
    costs: Costs
    status: Status

    @property
    def kept(self) -> np.ndarray:
        """True for each feature that is used: all features that are not constant."""
        return self.deviation > 0

    def apply(self, inputs: np.ndarray) -> np.ndarray:
        """Return scaled features without the constant ones; missing values are 0, the mean."""
        scaled = (inputs - self.mean)[:, self.kept] / self.deviation[self.kept]
        return np.where(np.isnan(scaled), 0, scaled)

    def apply_label(self, labels: np.ndarray) -> np.ndarray:
        """Return scaled labels; classes stay unchanged."""
        return (labels - self.label[0]) / self.label[1]


def constant_features(rows: np.ndarray) -> np.ndarray:
    """Return True for each feature with at most one value, [features]; missing values do not count."""
    gaps = np.isnan(rows)
    return np.max(np.where(gaps, -np.inf, rows), axis=0) <= np.min(np.where(gaps, np.inf, rows), axis=0)


def share_scaling(
    inputs: Sequence[np.ndarray], labels: Sequence[np.ndarray] | None, network: Network, key: Any, engine: Any
) -> Scaling:
    """Compute the scaling of all parties' training rows by two exact averages of sums.

    Args:
        inputs: Each party's training rows, NaN where a value is missing.
        labels: Each party's labels, to scale them too; None for classes.
        network: The network of the parties.
        key: Key of the random links.
        engine: The engine that hosts the parties.
    """
    joined = [_beside(own, None if labels is None else labels[k]) for k, own in enumerate(inputs)]
    with jax.enable_x64(True):
        sums = {
            "sum": np.stack([np.nansum(own, axis=0) for own in joined]),
            "present": np.stack([np.sum(~np.isnan(own), axis=0) for own in joined]),
            "rows": np.array([len(own) for own in joined], float),
        }
        first = average(sums, network, key=key, engine=engine, tolerance=1.0)
        mean = first.value["sum"] / np.maximum(first.value["present"], 1e-300)
        squares = np.stack([np.nansum((own - mean) ** 2, axis=0) for own in joined])
        second = average(squares, network, key=key, engine=engine, tolerance=1.0)
    deviation = np.sqrt(second.value / first.value["rows"])
    deviation = np.where(deviation > CONSTANT * np.abs(mean), deviation, 0)
    rows, costs = float(first.value["rows"]) * len(joined), first.costs + second.costs
    status = Status.of_all([first.status, second.status])
    if labels is None:
        return Scaling(mean, deviation, (0.0, 1.0), rows, costs, status)
    label = (float(mean[-1]), float(deviation[-1]) or 1.0)
    return Scaling(mean[:-1], deviation[:-1], label, rows, costs, status)


def _beside(inputs: np.ndarray, labels: np.ndarray | None) -> np.ndarray:
    return inputs if labels is None else np.concatenate([inputs, labels[:, None]], axis=1)
