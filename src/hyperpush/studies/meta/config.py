"""Decentralized meta-learning: clients agree on a representation on which heads of new tasks need few examples.

Hypers are the layers of the representation, params the heads of all clients' tasks (`hp.tasks.representation`). The
counterpart of figure 1 of Chen and Wang, "Locally differentially private decentralized stochastic bilevel
optimization", at a size for two cores.
"""

from typing import Literal

from pydantic import Field

from hyperpush.runs.experiment import Experiment, defer
from hyperpush.studies.common.config import Comparison
from hyperpush.studies.options import Count, Positive, Several


class Meta(Comparison):
    """Options of meta-learning, beside those of every comparison."""

    data: Literal["auto", "digits", "mnist", "emnist", "cifar10", "cifar100"] = Field(
        default="auto", description="Images; auto: CIFAR-10 if it is there, else scikit-learn's digits."
    )
    side: Count = Field(default=8, description="Images are shrunk to so many pixels a side.")
    clients: Several = Field(default=5, description="How many share the data.")
    tasks: Count = Field(default=4, description="Training tasks of each client.")
    ways: Several = Field(default=3, description="Classes of a task.")
    shots: Count = Field(default=3, description="Support examples of each class of a task.")
    queries: Count = Field(default=6, description="Query examples of each class of a training task.")
    new_classes: Several = Field(default=3, description="Classes that no training task has.")
    test_tasks: Count = Field(default=50, description="New tasks of known classes, and as many of new classes.")
    test_queries: Count = Field(default=15, description="Query examples of each class of a new task.")
    widths: tuple[Count, ...] = Field(default=(16,), min_length=1, description="Units of each layer, tanh after each.")
    l2: Positive = Field(default=0.03, description="L2 rate of a head.")
    loss: Literal["cross-entropy", "squares"] = Field(default="cross-entropy", description="Misfit of a head.")
    joint_steps: Count = Field(default=500, description="Steps of SGP that train one classifier of all known classes.")
    outer: tuple[Positive, ...] = Field(
        default=(0.3, 1.0, 3.0), min_length=1, description="Outer steps to try; rates of the joint classifier too."
    )
    inner: tuple[Positive, ...] = Field(
        default=(0.3, 1.0), min_length=1, description="Inner steps to try, in units of 1/λ_max of a client's Hessian."
    )


EXPERIMENT = Experiment(
    "meta",
    "Decentralized meta-learning: few-shot accuracy of an agreed representation, by method.",
    Meta,
    defer("hyperpush.studies.meta.study:run"),
)
