"""LDP-DSBO on streams of quadratics: how accuracy and privacy budget develop with time.

Samples arrive one per round and client and are used once. A strongly convex, a convex and a non-convex outer cost, runs
without noise, and with noise that does not fall, beside each other.
"""

from typing import Annotated, Literal

from pydantic import Field

from hyperpush.runs.config import Config
from hyperpush.runs.experiment import Experiment, defer
from hyperpush.studies.options import Count, Positive, Precision, Several

Case = Literal["strongly convex", "convex", "non-convex"]
CASES: tuple[Case, ...] = ("strongly convex", "convex", "non-convex")


class Private(Config):
    """Options of the study of private bilevel optimization; steps and noise fall as powers of the round."""

    clients: Annotated[int, Field(ge=3)] = 5
    network: str = Field(default="ring", description="Name of the network; it has to be undirected and static.")
    rounds: Annotated[int, Field(ge=100)] = Field(default=100_000, description="Rounds T, and samples of each client.")
    seeds: Several = Field(default=20, description="Runs, each with samples and noise of its own.")
    epsilon: Positive = Field(default=8.0, description="Pure ε that no client exceeds, however long it runs.")
    step: Positive = Field(default=0.05, description="Step at round 0.")
    step_exponent: Positive = Field(default=0.6, description="How fast steps fall.")
    noise_exponent: Positive = Field(default=0.55, description="How fast noise falls.")
    spread: Positive = Field(default=0.5, description="Samples differ from their mean by at most so much.")
    trials: Annotated[int, Field(ge=100)] = Field(default=100_000, description="Runs of the attack.")
    attacked: Count = Field(default=4, description="Rounds that the attack looks at.")
    cases: tuple[Case, ...] = Field(default=CASES, min_length=1, description="Outer costs; curve is that of the first.")
    seed: int = Field(default=0, ge=0, description="Decides the problem, the samples and every draw.")
    precision: Precision = "float64"


EXPERIMENT = Experiment(
    "private",
    "LDP-DSBO on streams: accuracy that improves for ever at a finite privacy budget.",
    Private,
    defer("hyperpush.studies.private.study:run"),
)
