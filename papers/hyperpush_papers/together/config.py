"""Everything together: train, learn personal parts and weights of examples, score, drop, continue, with controls.

Parties of a cluster turn their images of digits by the same angle, and a graph shows the clusters. Every second pair of
parties labels most of its training examples y + 1. Links are directed, change over time, and lose messages.
"""

from typing import Annotated, Literal

from hyperpush.base.config import Config
from hyperpush.base.limits import interval, whole
from hyperpush_papers.common.options import NONEMPTY, Count, NonNegative, Portion, Positive, Seeds, option, study

STEPS = ("train", "learn", "score", "continue", "private")


class Together(Config):
    """Options of the study `together`."""

    data: Literal["digits", "mnist", "emnist"] = option(
        "digits", "Digits; other than scikit-learn's need HYPERPUSH_DATA."
    )
    parties: Annotated[int, whole(4)] = option(8, "Number of parties, in two clusters of at least two.")
    examples: Count = option(60, "Training examples of each.")
    trusted: Count = option(5, "Validation examples of each, whose labels are right.")
    test: Count = option(80, "Test examples of each.")
    mislabel: Annotated[float, interval(0, 1)] = option(0.9, "Share of wrong labels among those of every second pair.")
    loss: Portion = option(0.1, "Probability that a message is lost.")
    steps: Count = option(
        120, "Steps of SGP before the first and after every outer step; in step train, five times as many."
    )
    outer_steps: Count = option(12, "Steps of the personal parts and weights.")
    order: Count = option(20, "Steps of TrackedHGP.")
    strength: NonNegative = option(1e-3, "Of ties between parties of a cluster.")
    until: Literal["train", "learn", "score", "continue", "private"] = option(
        "private", "The last step to take; private needs EMNIST in HYPERPUSH_DATA, and takes no size from here."
    )
    epsilons: Annotated[tuple[Positive, ...], NONEMPTY] = option((8.0, 2.0), "Of the private step, at δ = 1e-5.")
    seeds: Seeds = option((0, 1, 2, 3, 4), "Each with data, links and models of its own.")


EXPERIMENT = study(
    "together",
    "The whole story: train, learn personal parts and weights, score, drop, continue; with controls.",
    Together,
)
