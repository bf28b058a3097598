"""Error of VR-HGP by round and by its weights (α, β), compared with the theory.

The counterpart of figures 1 and 2 and of theorem 1 of "Personalized decentralized bilevel optimization over stochastic
and directed networks".
"""

from typing import Annotated, Literal

from hyperpush.base.config import Config
from hyperpush.base.limits import interval
from hyperpush_papers.common.options import NONEMPTY, Count, Counts, Positive, Precision, Seed, Several, option, study

Share = Annotated[float, interval(0, 1)]
Fraction = Annotated[float, interval(0, 1, outside="both")]


class VRStudy(Config):
    """Options of the study; the defaults are the paper's setting as far as it is stated."""

    clients: Several = option(3, "Number of clients.")
    data: Literal["auto", "mnist", "digits"] = option("auto", "auto: MNIST if HYPERPUSH_DATA has it, else digits.")
    examples: Count = option(100, "Training examples per client, and as many for validation, if there are as many.")
    hyper: Positive = option(0.1, "Every client's L2 rate on each parameter.")
    network: Literal["random-undirected", "random-directed"] = option(
        "random-undirected", "Whether both directions of a link are up together."
    )
    probability: tuple[Share, Share] = option((0.4, 0.8), "Range of the links' probabilities of being up.")
    inner_steps: Count = option(500, "Steps of stochastic gradient push to the inner solution.")
    step: Positive = option(0.5, "Its rate, which is also the step of the estimator.")
    rounds: Count = option(500, "Rounds M of the estimator.")
    weights: Annotated[tuple[tuple[Share, Share], ...], NONEMPTY] = option(
        ((1.0, 0.0), (0.9, 0.1), (0.5, 0.5), (0.9, 0.9), (0.9, 0.01), (0.99, 0.1), (0.99, 0.01)),
        "Pairs (α, β); (1, 0) is plain directed recurrent backpropagation.",
    )
    runs: Several = option(100, "Runs of the estimator on the one problem, with different seeds.")
    contractions: tuple[Fraction, ...] = option(
        (0.1, 0.3, 0.5, 0.7, 0.9, 0.95, 0.99), "Values of η_A at which μ is tabulated."
    )
    observers: Several = option(20, "Clients that observe links: errors with these beside those with true means.")
    trainings: Counts = option((20, 60, 200, 600, 2000), "Training steps in which they do.")
    mixing: Literal["fastest-mixing", "metropolis"] = option(
        "fastest-mixing", "Gossip weights of the static undirected network among them; the paper's need cvxpy."
    )
    link_rounds: Count = option(200, "Rounds of the estimators there.")
    link_runs: Several = option(40, "Trainings, each with an estimate.")
    failure: Fraction = option(0.05, "Probability with which the bound may fail.")
    seed: Seed = option(0, "Decides the digits, the data, the network and every draw.")
    precision: Precision = "float32"


EXPERIMENT = study("vr-hgp", "Error of variance-reduced hypergradients by their weights, and theory.", VRStudy)
