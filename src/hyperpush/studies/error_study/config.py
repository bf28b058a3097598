"""How far hypergradient push is from the true hypergradient, by order, pushes, batch size and inner solution.

The counterpart of figure 1(a)(b) of Terashita and Hara, "Decentralized hyper-gradient computation over time-varying
directed networks", and of the trends that its theorems predict.
"""

from typing import Any

from pydantic import Field

from hyperpush.runs.config import Config
from hyperpush.runs.experiment import Experiment, defer
from hyperpush.studies.options import Count, Positive, Precision, Several


class ErrorStudy(Config):
    """Options of the error study; the defaults are the paper's setting."""

    clients: Several = Field(default=3, description="Number of clients.")
    examples: Several = Field(default=100, description="Training examples per client, and as many for validation.")
    hyper: Positive = Field(
        default=0.01, description="Every client's L2 rate on each parameter, where it is evaluated."
    )
    network: str = Field(default="random-directed", description="Name of the network.")
    network_options: dict[str, Any] = Field(default={}, description="Options of the network, such as probability.")
    inner_steps: Count = Field(default=5000, description="Steps of stochastic gradient push to the inner solution.")
    inner_rate: Positive = Field(default=2.0, description="Its first learning rate, lowered tenfold at milestones.")
    order: Count = Field(default=1000, description="Largest order M of the hypergradient's series.")
    pushes: tuple[Count, ...] = Field(default=(1, 2, 5, 10, 100), min_length=1, description="Push-sum steps per order.")
    step: Positive = Field(default=1.0, description="Step size of the hypergradient's fixed-point iteration.")
    batches: tuple[Count, ...] = Field(
        default=(100, 20),
        min_length=1,
        description="Batch sizes of the products; `examples` or more is the full batch.",
    )
    runs: Several = Field(default=10, description="Runs of the estimator on the one problem, with different seeds.")
    trend_batches: tuple[Count, ...] = Field(
        default=(5, 10, 20, 40, 80), description="Batch sizes of the trend against batch size."
    )
    trend_inner_steps: tuple[Count, ...] = Field(
        default=(5, 10, 20, 50, 100, 200, 500), description="Inner steps of the trend against inexact inner solutions."
    )
    trend_pushes: Count = Field(default=10, description="Push-sum steps per order in both trends.")
    seed: int = Field(default=0, ge=0, description="Decides the data, the network and every draw.")
    precision: Precision = "float32"


EXPERIMENT = Experiment(
    "error-study",
    "Error of hypergradient push against the closed form.",
    ErrorStudy,
    defer("hyperpush.studies.error_study.study:run"),
)
