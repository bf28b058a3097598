"""Influence of training examples: predicted without moving data, checked by retraining without them.

It follows section 5.2 and appendix A.2 of Terashita and Hara, "Decentralized hyper-gradient computation over
time-varying directed networks". The study adds groups, whole clients, damping, and a search for wrong labels
(docs/results/influence.md).
"""

from typing import Annotated, Literal

from hyperpush.base.config import Config
from hyperpush.base.limits import whole
from hyperpush_papers.common.options import (
    NONEMPTY,
    Count,
    NetworkOptions,
    NonNegative,
    Positive,
    Precision,
    Several,
    Whole,
    option,
    study,
)

# Values of options that are not given, for a CNN.
CNN = {"steps": 1000, "rate": 0.05, "batches": (0, 64), "l2": 1e-3}
CNN |= {"removals": 20, "at_once": 1, "order": 1000, "step": 0.05}


class Hunt(Config):
    """Options of the search for wrong labels on scikit-learn's digits."""

    seeds: Whole = option(3, "How often, with data and flips of their own; 0: not at all.")
    kinds: Annotated[tuple[Literal["random", "systematic"], ...], NONEMPTY] = option(
        ("random", "systematic"),
        "Wrong labels: random ones, or those of neighbors in the order of labels become the next label.",
    )
    damping: NonNegative = option(0.01, "Added to the mean Hessian.")
    steps: Count = option(2000, "Steps of stochastic gradient push.")


class InfluenceStudy(Config):
    """Options of the study of influence; the defaults of missing options depend on the model."""

    model: Literal["logistic", "cnn"] = option("logistic", "What is trained.")
    clients: Several = option(3, "Number of clients.")
    network: str = option("random-directed", "Name of the network.")
    network_options: NetworkOptions = option({}, "Options of the network, such as probability.")
    examples: Several = option(100, "Logistic regression: training examples per client, and as many for validation.")
    data: Literal["auto", "emnist", "mnist", "digits"] = option(
        "auto", "CNN: images of digits; auto is EMNIST if HYPERPUSH_DATA has it, else scikit-learn's."
    )
    images: Annotated[int, whole(20)] = option(
        600, "CNN: images in all, 60 % of them for training and 20 % for validation."
    )
    concentration: Positive = option(0.4, "CNN: of the Dirichlet split of each label's images.")
    steps: Count = option(5000, "Steps of SGP; CNN: 1000.")
    rate: Positive = option(2.0, "Its first learning rate; CNN: 0.05.")
    batches: Annotated[tuple[Whole, ...], NONEMPTY] = option(
        (0,), "Batch sizes to train with, 0 for all examples; CNN: [0, 64]."
    )
    l2: NonNegative = option(0.01, "L2 rate; CNN: 0.001.")
    removals: Count = option(50, "Examples to remove one by one; CNN: 20.")
    at_once: Count = option(64, "Retrainings side by side; CNN: 1, as convolutions of one run fill the cores.")
    damping: NonNegative = option(0.0, "Added to the mean Hessian.")
    dampings: tuple[NonNegative, ...] = option((0.0, 0.01, 0.1, 1.0), "Others, whose effect is measured.")
    order: Count = option(500, "HGP's order, and most steps of TrackedHGP; CNN: 1000.")
    pushes: Count = option(100, "HGP's pushes per order.")
    step: Positive = option(1.0, "HGP's step; CNN: 0.05.")
    unrolled: bool = option(True, "Also differentiate the training run itself, by ITDBackward.")
    groups: tuple[Count, ...] = option((5, 20, 60), "Sizes of groups to remove together.")
    leave: bool = option(True, "Also let every client leave once.")
    hunt: Hunt = Hunt()
    seed: Whole = option(0, "Decides the data, the network and every draw.")
    precision: Precision = "float32"

    def check(self) -> None:
        """For a CNN, give all missing options the CNN's default values."""
        if self.model == "cnn":  # by `vars`, since options are frozen after they are made
            vars(self).update({name: value for name, value in CNN.items() if name not in self.given})


EXPERIMENT = study(
    "influence",
    "Which training examples help or hurt everyone: predicted, and checked by retraining without them.",
    InfluenceStudy,
)
