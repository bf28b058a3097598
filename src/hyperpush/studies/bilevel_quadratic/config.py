"""Every bilevel algorithm on one problem with closed forms: where each ends, by iteration and by floats sent.

Unlike quadratics with one hyper for all clients. Distances are of the farthest client, relative to the start's.
"""

from pydantic import Field

from hyperpush.runs.config import Config
from hyperpush.runs.experiment import Experiment, defer
from hyperpush.studies.options import Count, Positive, Precision, Several


class BilevelQuadratic(Config):
    """Options of the comparison of bilevel algorithms."""

    clients: Several = 5
    network: str = Field(default="ring", description="Name of the network; it has to be undirected.")
    methods: tuple[str, ...] = Field(default=(), description="Which to run, by their first word; all if left out.")
    iterations: Count = Field(default=1000, description="Iterations of methods that end at a point at constant steps.")
    steps: tuple[Positive, ...] = Field(
        default=(0.1, 0.03, 0.01), description="Constant steps of methods that are as far off as their steps are large."
    )
    passes: Positive = Field(
        default=40, description="Their iterations, times the step: how often they could forget where they started."
    )
    falling: Count = Field(default=100_000, description="Iterations of the same methods with falling steps.")
    outer_steps: Count = Field(default=40, description="Outer steps of the methods that solve the inner problem first.")
    seed: int = Field(default=0, ge=0, description="Decides the problem and every draw.")
    precision: Precision = "float64"


EXPERIMENT = Experiment(
    "bilevel-quadratic",
    "Every bilevel algorithm on unlike quadratics: where each ends, by iteration and by floats.",
    BilevelQuadratic,
    defer("hyperpush.studies.bilevel_quadratic.study:run"),
)
