"""How far VR-HGP is from its target by round and by its weights (α, β), beside what theory says.

The counterpart of figures 1 and 2 and of theorem 1 of "Personalized decentralized bilevel optimization over stochastic
and directed networks".
"""

from typing import Annotated, Literal

from pydantic import Field

from hyperpush.runs.config import Config
from hyperpush.runs.experiment import Experiment, defer
from hyperpush.studies.options import Count, Positive, Precision, Several

Share = Annotated[float, Field(ge=0, le=1)]
Fraction = Annotated[float, Field(gt=0, lt=1)]


class VRStudy(Config):
    """Options of the study; the defaults are the paper's setting as far as it is told."""

    clients: Several = Field(default=3, description="Number of clients.")
    data: Literal["auto", "mnist", "digits"] = Field(
        default="auto",
        description="Images: MNIST in $HYPERPUSH_DATA/mnist, scikit-learn's digits; auto: what is there.",
    )
    examples: Count = Field(
        default=100, description="Training examples per client, and as many for validation; fewer if images run out."
    )
    hyper: Positive = Field(default=0.1, description="Every client's L2 rate on each parameter.")
    network: Literal["random-undirected", "random-directed"] = Field(
        default="random-undirected", description="Whether both directions of a link are up together."
    )
    probability: tuple[Share, Share] = Field(
        default=(0.4, 0.8), description="Range from which each link's probability of being up is drawn."
    )
    inner_steps: Count = Field(default=500, description="Steps of stochastic gradient push to the inner solution.")
    step: Positive = Field(default=0.5, description="Its rate, which is also the step of the estimator.")
    rounds: Count = Field(default=500, description="Rounds M of the estimator.")
    weights: tuple[tuple[Share, Share], ...] = Field(
        default=((1.0, 0.0), (0.9, 0.1), (0.5, 0.5), (0.9, 0.9), (0.9, 0.01), (0.99, 0.1), (0.99, 0.01)),
        min_length=1,
        description="Pairs (α, β); (1, 0) is plain directed recurrent backpropagation.",
    )
    runs: Several = Field(default=100, description="Runs of the estimator on the one problem, with different seeds.")
    contractions: tuple[Fraction, ...] = Field(
        default=(0.1, 0.3, 0.5, 0.7, 0.9, 0.95, 0.99), description="Values of η_A at which μ is tabulated."
    )
    failure: Fraction = Field(default=0.05, description="Probability with which the bound may fail.")
    seed: int = Field(default=0, ge=0, description="Decides the digits, the data, the network and every draw.")
    precision: Precision = "float32"


EXPERIMENT = Experiment(
    "vr-hgp",
    "Error of variance-reduced hypergradients by their weights, and theory.",
    VRStudy,
    defer("hyperpush.studies.vr_hgp.study:run"),
)
