"""Decentralized meta-learning: clients agree on a representation on which heads of new tasks need few examples.

Hypers are the layers of the representation, params the heads of all clients' tasks (module `representation`). The
counterpart of figure 1 of Chen and Wang, "Locally differentially private decentralized stochastic bilevel
optimization", at a size for two cores.
"""

from typing import Literal

from hyperpush_papers.common.config import Comparison
from hyperpush_papers.common.options import Count, Counts, Positive, Positives, Several, option, study


class Meta(Comparison):
    """Options of meta-learning, in addition to those of every comparison."""

    data: Literal["auto", "digits", "mnist", "emnist", "cifar10", "cifar100"] = option(
        "auto", "Images; auto: CIFAR-10 if it is there, else scikit-learn's digits."
    )
    side: Count = option(8, "Images are shrunk to this number of pixels per side.")
    clients: Several = option(5, "How many share the data.")
    tasks: Count = option(4, "Training tasks of each client.")
    ways: Several = option(3, "Classes of a task.")
    shots: Count = option(3, "Support examples of each class of a task.")
    queries: Count = option(6, "Query examples of each class of a training task.")
    new_classes: Several = option(3, "Classes that no training task has.")
    test_tasks: Count = option(50, "New tasks of known classes, and as many of new classes.")
    test_queries: Count = option(15, "Query examples of each class of a new task.")
    widths: Counts = option((16,), "Units of each layer, tanh after each.")
    l2: Positive = option(0.03, "L2 rate of a head.")
    loss: Literal["cross-entropy", "squares"] = option("cross-entropy", "Misfit of a head.")
    joint_steps: Count = option(500, "Steps of SGP that train one classifier of all known classes.")
    outer: Positives = option((0.3, 1.0, 3.0), "Outer steps to try; rates of the joint classifier too.")
    inner: Positives = option((0.3, 1.0), "Inner steps, in units of 1/λ_max of a Hessian.")


EXPERIMENT = study(
    "meta", "Decentralized meta-learning: few-shot accuracy of an agreed representation, by method.", Meta
)
