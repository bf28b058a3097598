"""LDP-DSBO on streams of quadratics: how accuracy and privacy budget develop with time.

In each round every client gets one sample and uses it once. The study compares a strongly convex, a convex and a
non-convex outer cost. It also compares falling noise with constant noise and with none.
"""

from typing import Annotated, Literal

from hyperpush.base.config import Config
from hyperpush.base.limits import whole
from hyperpush_papers.common.options import NONEMPTY, Count, Positive, Precision, Seed, Several, option, study

Case = Literal["strongly convex", "convex", "non-convex"]
CASES: tuple[Case, ...] = ("strongly convex", "convex", "non-convex")


class Private(Config):
    """Options of the study of private bilevel optimization; step sizes and noise fall as powers of the round."""

    clients: Annotated[int, whole(3)] = 5
    network: str = option("ring", "Name of the network; it has to be undirected and static.")
    rounds: Annotated[int, whole(100)] = option(100_000, "Rounds T, and samples of each client.")
    seeds: Several = option(20, "Runs, each with samples and noise of its own.")
    epsilon: Positive = option(8.0, "Pure ε that no client exceeds, however long it runs.")
    step: Positive = option(0.05, "Step at round 0.")
    step_exponent: Positive = option(0.6, "How fast steps fall.")
    noise_exponent: Positive = option(0.55, "How fast noise falls.")
    spread: Positive = option(0.5, "Samples differ from their mean by at most this much.")
    trials: Annotated[int, whole(100)] = option(100_000, "Runs of the attack.")
    attacked: Count = option(4, "Rounds that the attack looks at.")
    cases: Annotated[tuple[Case, ...], NONEMPTY] = option(CASES, "Outer costs; curve is that of the first.")
    seed: Seed = option(0, "Decides the problem, the samples and every draw.")
    precision: Precision = "float64"


EXPERIMENT = study(
    "private", "LDP-DSBO on streams: accuracy that improves forever at a finite privacy budget.", Private
)
