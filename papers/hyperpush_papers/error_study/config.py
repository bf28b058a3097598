"""Error of hypergradient push by order, pushes, batch size and inner solution.

The counterpart of figure 1(a)(b) of Terashita and Hara, "Decentralized hyper-gradient computation over time-varying
directed networks", and of the trends that its theorems predict.
"""

from hyperpush.base.config import Config
from hyperpush_papers.common.options import (
    Count,
    Counts,
    NetworkOptions,
    Positive,
    Precision,
    Seed,
    Several,
    option,
    study,
)


class ErrorStudy(Config):
    """Options of the error study; the defaults are the paper's setting."""

    clients: Several = option(3, "Number of clients.")
    examples: Several = option(100, "Training examples per client, and as many for validation.")
    hyper: Positive = option(0.01, "Every client's L2 rate on each parameter.")
    network: str = option("random-directed", "Name of the network.")
    network_options: NetworkOptions = option({}, "Options of the network, such as probability.")
    inner_steps: Count = option(5000, "Steps of stochastic gradient push to the inner solution.")
    inner_rate: Positive = option(2.0, "Its first learning rate, lowered tenfold at milestones.")
    order: Count = option(1000, "Largest order M of the hypergradient's series.")
    pushes: Counts = option((1, 2, 5, 10, 100), "Push-sum steps per order.")
    step: Positive = option(1.0, "Step size of the hypergradient's fixed-point iteration.")
    batches: Counts = option((100, 20), "Batch sizes; `examples` or more is the full batch.")
    runs: Several = option(10, "Runs of the estimator on the one problem, with different seeds.")
    trend_batches: tuple[Count, ...] = option((5, 10, 20, 40, 80), "Batch sizes of the trend.")
    trend_inner_steps: tuple[Count, ...] = option((5, 10, 20, 50, 100, 200, 500), "Steps to inexact inner solutions.")
    trend_pushes: Count = option(10, "Push-sum steps per order in both trends.")
    seed: Seed = option(0, "Decides the data, the network and every draw.")
    precision: Precision = "float32"


EXPERIMENT = study("error-study", "Error of hypergradient push against the closed form.", ErrorStudy)
