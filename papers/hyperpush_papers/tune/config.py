"""Hyperparameters tuned by every bilevel algorithm, with and without privacy.

There are three tasks. `cleaning` tunes weights of training examples, some of which have wrong labels. `class-weights`
tunes a weight for each class, and `l2` an L2 rate for each feature. They follow the figures of Chen and Wang, "Locally
differentially private decentralized stochastic bilevel optimization", on similar data.
"""

from typing import Literal

from hyperpush_papers.common.config import Comparison
from hyperpush_papers.common.options import Count, Portion, Positive, option, study


class Tune(Comparison):
    """Options of the comparison on tuning tasks."""

    task: Literal["cleaning", "class-weights", "l2"] = option("cleaning", "What is tuned.")
    data: Literal["auto", "mnist", "digits", "a9a", "synthetic"] = option(
        "auto", "a9a or synthetic for l2, else mnist or digits; auto: the first if it is there."
    )
    examples: Count | None = option(None, "Training examples of a client; by task if not set.")
    validation: Count | None = option(None, "Validation examples of a client; by task if not set.")
    corrupted: Portion = option(0.3, "Share of wrong training labels; in class-weights they name every third class.")
    l2: Positive = option(3e-4, "L2 rate of the weighted classifiers.")
    test: Count = option(2000, "Test examples, at most.")


EXPERIMENT = study("tune", "Tuning of weights or L2 rates by every bilevel algorithm, with and without privacy.", Tune)
