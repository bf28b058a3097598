"""BiG-Fed on the karate club: do inner and outer cost fall together, and which method has the lowest test loss
(docs/guides/big-fed.md)?

Each of 34 clients fits its own function, which depends on the client's node in the club's graph. Models are linear
layers with a shared middle layer. All methods start from the same layers. Their step sizes are chosen from grids of
equal size, by the validation loss averaged over rounds and seeds.
"""

from typing import Annotated, Literal

from hyperpush.base.config import Config
from hyperpush.base.errors import InvalidInput
from hyperpush.base.limits import whole
from hyperpush_papers.common.options import (
    Count,
    NonNegative,
    Positive,
    Positives,
    Precision,
    Several,
    Whole,
    option,
    study,
)


class Tuned(Config):
    """Grids of step sizes for BiG-Fed and the methods that it is compared with."""

    rounds: Annotated[int, whole(10)] = option(300, "Rounds of every method.")
    seeds: Count = option(5, "Runs, each with draws of its own.")
    width: Count = option(8, "Width of the layers.")
    rates: Positives = option((0.03, 0.1, 0.3, 1.0), "Inner steps to choose from.")
    outer_steps: Positives = option((0.003, 0.03), "First outer steps to choose from.")
    outer_exponent: NonNegative = option(0.6, "The outer step of round k is the first one / (k + 1)^this.")
    damping: Positive = option(1.0, "Added to the diagonal of every block.")
    solver_steps: Count = option(20, "Conjugate gradient steps of every solve with a block.")
    negatives: Positive = option(5.0, "Negative samples for each link.")
    seed: Whole = option(0, "The first of the seeds.")
    precision: Precision = "float32"


class BigFed(Tuned):
    """Options of the comparison on the karate club."""

    examples: Several = option(50, "Of each client, as often for training, validation and test.")
    multipliers: tuple[float, float] | Literal["raw"] = option(
        (0.1, 0.6), "Range of b in y = a·sin(bx); raw: the coordinate itself."
    )
    start: Positive = option(0.25, "Size of the first and last layer at the start, in units of 1.")
    same_start: bool = option(True, "Whether all clients start from the same layers.")
    clusters: tuple[Count, ...] = option((4, 8, 16), "Of FeSEM and FL+HC.")
    network: str = option("random-undirected", "Name of the network of the form without a server.")
    frozen_rate: Positive = option(0.03, "Inner step of the runs with a frozen kernel.")

    def check(self) -> None:
        """Raise InvalidInput if a range of options is empty."""
        if not isinstance(self.multipliers, str) and not 0 <= self.multipliers[0] < self.multipliers[1]:
            raise InvalidInput("multipliers", list(self.multipliers), "two numbers, 0 ≤ low < high, or 'raw'")


EXPERIMENT = study(
    "big-fed", "BiG-Fed on the karate club against FedAvg, FeSEM, FL+HC and training alone, all tuned alike.", BigFed
)
