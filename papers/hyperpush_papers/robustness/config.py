"""Rates of wrong estimates, and of estimates that their status flags, over families of problems and networks.

All problems are quadratic. Params are at the inner solution, except in families that train. NumPy computes the true
hypergradients in float64.
"""

from typing import Annotated, Literal

from hyperpush.base.config import Config
from hyperpush.base.limits import whole
from hyperpush_papers.common.options import NONEMPTY, Count, Positive, Precision, Seed, Several, option, study

Family = Literal[
    "mild",
    "scales",
    "indefinite-local",
    "disjoint",
    "low-rank-1e2",
    "low-rank-1e4",
    "kappa-1e3",
    "kappa-1e4",
    "zero-third",
    "singular",
    "indefinite",
    "hidden",
    "cancelling-1e2",
    "cancelling-1e4",
    "lossy",
    "lossy-singular",
    "trained",
]
FAMILIES: tuple[Family, ...] = Family.__args__
NETWORKS = (
    "random-directed",
    "k-out",
    "one-peer-exponential",
    "static-undirected",
    "directed-ring",
    "star",
    "torus",
    "fully-connected",
)


class Robustness(Config):
    """Options of the study of robustness."""

    estimators: Annotated[tuple[str, ...], NONEMPTY] = option(
        ("Automatic", "TrackedHGP"), "Estimators, with their defaults."
    )
    families: Annotated[tuple[Family, ...], NONEMPTY] = option(FAMILIES, "Families of problems.")
    networks: Annotated[tuple[str, ...], NONEMPTY] = option(NETWORKS, "Names of networks.")
    dtypes: Annotated[tuple[Precision, ...], NONEMPTY] = option(("float64", "float32"), "Precisions.")
    seeds: Count = option(16, "Problems of each family on each network.")
    clients: Annotated[int, whole(3)] = option(6, "Number of clients.")
    params: Several = option(20, "Number of parameters.")
    hypers: Count = option(25, "Number of hyperparameters of each client.")
    out_links: Count = option(2, "Links of each client on k-out graphs.")
    tolerance: Positive = option(1e-3, "Largest relative error of any client's result that counts as right.")
    seed: Seed = option(0, "Decides the problems and the networks.")


EXPERIMENT = study("robustness", "How often estimators are wrong, and how often they say so.", Robustness)
