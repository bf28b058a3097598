"""BiG-Fed on the karate club: do both costs fall together, and who has the lowest test loss (docs/guides/big-fed.md)?

34 clients, each with a function of its own that follows from its place in the club's graph, regress it with linear
layers of which the middle one is everybody's. All methods start from the same layers and choose their steps from
equally many, by the validation loss averaged over rounds and seeds.
"""

from typing import Annotated, Literal

from pydantic import Field, field_validator

from hyperpush.runs.config import Config
from hyperpush.runs.experiment import Experiment, defer
from hyperpush.studies.options import Count, Positive, Precision, Several


class Tuned(Config):
    """What BiG-Fed and whom it is compared with choose from."""

    rounds: Annotated[int, Field(ge=10)] = Field(default=300, description="Rounds of every method.")
    seeds: Count = Field(default=5, description="Runs, each with draws of its own.")
    width: Count = Field(default=8, description="Width of the layers.")
    rates: tuple[Positive, ...] = Field(
        default=(0.03, 0.1, 0.3, 1.0), min_length=1, description="Inner steps to choose from."
    )
    outer_steps: tuple[Positive, ...] = Field(
        default=(0.003, 0.03), min_length=1, description="First outer steps to choose from."
    )
    outer_exponent: Annotated[float, Field(ge=0)] = Field(
        default=0.6, description="The outer step of round k is the first one / (k + 1)^this."
    )
    damping: Positive = Field(default=1.0, description="Added to the diagonal of every block.")
    solver_steps: Count = Field(default=20, description="Conjugate gradient steps of every solve with a block.")
    negatives: Positive = Field(default=5.0, description="Negative samples for each link.")
    seed: int = Field(default=0, ge=0, description="The first of the seeds.")
    precision: Precision = "float32"


class BigFed(Tuned):
    """Options of the comparison on the karate club."""

    examples: Several = Field(default=50, description="Of each client, as often for training, validation and test.")
    multipliers: tuple[float, float] | Literal["raw"] = Field(
        default=(0.1, 0.6), description="Range of b in y = a·sin(bx); raw: the coordinate itself."
    )
    start: Positive = Field(default=0.25, description="Size of the first and last layer at the start, in units of 1.")
    same_start: bool = Field(default=True, description="Whether all clients start from the same layers.")
    clusters: tuple[Count, ...] = Field(default=(4, 8, 16), description="Of FeSEM and FL+HC.")
    network: str = Field(default="random-undirected", description="Name of the network of the form without a server.")
    frozen_rate: Positive = Field(default=0.03, description="Inner step of the runs with a frozen kernel.")

    @field_validator("multipliers")
    @classmethod
    def _check_order(cls, value: tuple[float, float] | str) -> tuple[float, float] | str:
        if not isinstance(value, str) and not 0 <= value[0] < value[1]:
            raise ValueError("two numbers, 0 ≤ low < high, or 'raw'")
        return value


EXPERIMENT = Experiment(
    "big-fed",
    "BiG-Fed on the karate club against FedAvg, FeSEM, FL+HC and training alone, all tuned alike.",
    BigFed,
    defer("hyperpush.studies.big_fed.study:run_big_fed"),
)
