"""Every hypergradient estimator on one problem and several networks: error by rounds and by floats sent.

The problem is logistic regression with L2 rates as hypers, at its exact inner solution. HGP runs on a grid of pushes
and step sizes; Automatic and TrackedHGP run without settings. Estimators that differentiate SGP are compared with their
own target, which follows from SGP's expected step. All others are compared with the closed form.
"""

from typing import Annotated

from hyperpush.base.config import Config
from hyperpush_papers.common.options import (
    NONEMPTY,
    Count,
    Portion,
    Positive,
    Precision,
    Seed,
    Several,
    Whole,
    option,
    study,
)

NETWORKS = ("random-directed", "k-out", "one-peer-exponential", "static-undirected", "directed-ring")


class Estimators(Config):
    """Options of the comparison of estimators."""

    sizes: Annotated[tuple[tuple[Several, Several], ...], NONEMPTY] = option(
        ((3, 6), (50, 100)), "Numbers of clients and of parameters."
    )
    networks: Annotated[tuple[str, ...], NONEMPTY] = option(NETWORKS, "Names of networks.")
    out_links: Count = option(3, "Links of each client on k-out graphs, where there are as many.")
    examples: Count = option(100, "Training examples per client, and as many for validation.")
    hyper: Positive = option(0.01, "Every client's L2 rate on each parameter.")
    pushes: tuple[Count, ...] = option((1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000), "HGP's pushes.")
    steps: tuple[Positive, ...] = option((0.5, 1.0, 1.5), "HGP's step sizes, in units of 1/λ_max of the mean Hessian.")
    order: Count = option(150, "Largest order of HGP and of the one-machine estimators.")
    tolerance: Positive = option(1e-8, "Tolerance of the curves of Automatic and TrackedHGP.")
    loss: Portion = option(0.3, "Share of messages that get lost in the last part; 0 leaves it out.")
    factors: Annotated[tuple[Positive, ...], NONEMPTY] = option(
        (0.5, 1, 2, 4), "Pushes of TrackedHGP where messages get lost, times what it finds where none do."
    )
    lossy_steps: Count = option(100, "Its steps there.")
    recurrent: Whole = option(1000, "Rounds of the estimators that go back through SGP.")
    recurrent_step: Positive = option(0.5, "Their step size, in units of 1/λ_max.")
    seed: Seed = option(0, "Decides the data, the networks and every draw.")
    precision: Precision = "float64"


EXPERIMENT = study(
    "estimators", "Every hypergradient estimator on several networks, by rounds and by floats sent.", Estimators
)
