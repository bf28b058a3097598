"""Every hypergradient estimator on one problem and several networks: error by rounds and by floats sent.

Logistic regression with L2 rates as hypers, at its exact inner solution. HGP is run on a whole grid of pushes and step
sizes, TrackedHGP with its defaults. Estimators that go back through SGP are compared with their own target, the
derivative of SGP's expected step, all others with the closed form.
"""

from pydantic import Field

from hyperpush.runs.config import Config
from hyperpush.runs.experiment import Experiment, defer
from hyperpush.studies.options import Count, Positive, Precision, Several

NETWORKS = ("random-directed", "k-out", "one-peer-exponential", "static-undirected", "directed-ring")


class Estimators(Config):
    """Options of the comparison of estimators."""

    sizes: tuple[tuple[Several, Several], ...] = Field(
        default=((3, 6), (50, 100)), min_length=1, description="Pairs of a number of clients and of parameters."
    )
    networks: tuple[str, ...] = Field(default=NETWORKS, min_length=1, description="Names of networks.")
    out_links: Count = Field(default=3, description="Links of each client on k-out graphs, where there are as many.")
    examples: Count = Field(default=100, description="Training examples per client, and as many for validation.")
    hyper: Positive = Field(default=0.01, description="Every client's L2 rate on each parameter.")
    pushes: tuple[Count, ...] = Field(
        default=(1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000), description="HGP's grid: pushes per order."
    )
    steps: tuple[Positive, ...] = Field(
        default=(0.5, 1.0, 1.5), description="HGP's grid: step sizes, in units of 1/λ_max of the mean Hessian."
    )
    order: Count = Field(default=150, description="Largest order of HGP and of the one-machine estimators.")
    tolerance: Positive = Field(default=1e-8, description="Where tracked HGP may end.")
    recurrent: int = Field(default=1000, ge=0, description="Rounds of the estimators that go back through SGP.")
    recurrent_step: Positive = Field(default=0.5, description="Their step size, in units of 1/λ_max.")
    seed: int = Field(default=0, ge=0, description="Decides the data, the networks and every draw.")
    precision: Precision = "float64"


EXPERIMENT = Experiment(
    "estimators",
    "Every hypergradient estimator on several networks, by rounds and by floats sent.",
    Estimators,
    defer("hyperpush.studies.estimators.study:run"),
)
