"""How often an estimator is wrong, and how often it says so, over families of problems and networks.

All problems are quadratic, at their inner solution. NumPy knows their hypergradients in float64.
"""

from typing import Annotated, Literal

from pydantic import Field

from hyperpush.spec.config import Config
from hyperpush_papers.common.options import Count, Positive, Precision, Seed, Several, option, study

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

    estimators: tuple[str, ...] = option(("Automatic", "TrackedHGP"), "Estimators, with their defaults.", min_length=1)
    families: tuple[Family, ...] = option(FAMILIES, "Families of problems.", min_length=1)
    networks: tuple[str, ...] = option(NETWORKS, "Names of networks.", min_length=1)
    dtypes: tuple[Precision, ...] = option(("float64", "float32"), "Precisions.", min_length=1)
    seeds: Count = option(16, "Problems of each family on each network.")
    clients: Annotated[int, Field(ge=3)] = option(6, "Number of clients.")
    params: Several = option(20, "Number of parameters.")
    hypers: Count = option(25, "Number of hyperparameters of each client.")
    out_links: Count = option(2, "Links of each client on k-out graphs.")
    tolerance: Positive = option(1e-3, "Largest relative error of any client's result that counts as right.")
    seed: Seed = option(0, "Decides the problems and the networks.")


EXPERIMENT = study("robustness", "How often estimators are wrong, and how often they say so.", Robustness)
