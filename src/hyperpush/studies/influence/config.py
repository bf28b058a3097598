"""Which training examples help or hurt everyone: predicted without moving data, checked by retraining without them.

The counterpart of section 5.2 and appendix A.2 of Terashita and Hara, "Decentralized hyper-gradient computation over
time-varying directed networks"; then groups, whole clients, damping, and a hunt for wrong labels
(docs/results/influence.md).
"""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from hyperpush.errors import InvalidInput
from hyperpush.runs.config import Config
from hyperpush.runs.experiment import Experiment, defer
from hyperpush.studies.options import Count, Positive, Precision, Several


class Hunt(Config):
    """The hunt for wrong labels on scikit-learn's digits."""

    seeds: int = Field(default=3, ge=0, description="How often, with data and flips of their own; 0: not at all.")
    clients: Several = Field(default=5, description="Number of clients.")
    noisy: Count = Field(default=2, description="How many of them have wrong labels.")
    share: float = Field(default=0.1, gt=0, lt=1, description="Share of their labels that is wrong.")
    kinds: tuple[Literal["random", "systematic"], ...] = Field(
        default=("random", "systematic"),
        min_length=1,
        description="Wrong labels: random ones, or those of neighbors in the order of labels become the next label.",
    )
    damping: float = Field(default=0.01, ge=0, description="Added to the mean Hessian.")
    steps: Count = Field(default=2000, description="Steps of stochastic gradient push.")
    rate: Positive = Field(default=0.5, description="Its first learning rate.")
    l2: Positive = Field(default=1e-3, description="L2 rate of the softmax regression.")

    @model_validator(mode="after")
    def _enough_clients(self) -> "Hunt":
        if self.noisy > self.clients:
            raise InvalidInput("hunt.noisy", self.noisy, f"at most {self.clients}, the clients")
        return self


class InfluenceStudy(Config):
    """Options of the study of influence; what is left out depends on the model."""

    model: Literal["logistic", "cnn"] = Field(default="logistic", description="What is trained.")
    clients: Several = Field(default=3, description="Number of clients.")
    network: str = Field(default="random-directed", description="Name of the network.")
    network_options: dict[str, Any] = Field(default={}, description="Options of the network, such as probability.")
    examples: Several = Field(
        default=100, description="Logistic regression: training examples per client, and as many for validation."
    )
    data: Literal["auto", "emnist", "mnist", "digits"] = Field(
        default="auto",
        description="CNN: images of digits; auto is EMNIST if HYPERPUSH_DATA has it, else scikit-learn's.",
    )
    images: Annotated[int, Field(ge=20)] = Field(
        default=600, description="CNN: images in all, of which 60 % are for training and 20 % for validation."
    )
    concentration: Positive = Field(default=0.4, description="CNN: of the Dirichlet split of each label's images.")
    steps: Count | None = Field(default=None, description="Steps of SGP: 5000, CNN 1000.")
    rate: Positive | None = Field(default=None, description="Its first learning rate: 2, CNN 0.05.")
    batches: tuple[Annotated[int, Field(ge=0)], ...] | None = Field(
        default=None, min_length=1, description="Batch sizes to train with, 0 for all examples: [0], CNN [0, 64]."
    )
    l2: Annotated[float, Field(ge=0)] | None = Field(default=None, description="L2 rate: 0.01, CNN 0.001.")
    removals: Count | None = Field(default=None, description="Examples to remove one by one: 50, CNN 20.")
    at_once: Count | None = Field(default=None, description="Retrainings side by side: 64, CNN 1.")
    damping: float = Field(default=0.0, ge=0, description="Added to the mean Hessian.")
    dampings: tuple[Annotated[float, Field(ge=0)], ...] = Field(
        default=(0.0, 0.01, 0.1, 1.0), description="Others, whose effect is measured."
    )
    order: Count | None = Field(default=None, description="HGP's order, and most steps of TrackedHGP: 500, CNN 1000.")
    pushes: Count = Field(default=100, description="HGP's pushes per order.")
    step: Positive | None = Field(default=None, description="HGP's step: 1, CNN 0.05.")
    unrolled: bool = Field(default=True, description="Also differentiate the training run itself, by ITDBackward.")
    groups: tuple[Count, ...] = Field(default=(5, 20, 60), description="Sizes of groups to remove together.")
    leave: bool = Field(default=True, description="Also let every client leave once.")
    hunt: Hunt = Hunt()
    seed: int = Field(default=0, ge=0, description="Decides the data, the network and every draw.")
    precision: Precision = "float32"

    def complete(self) -> "InfluenceStudy":
        """With the model's own values for all that was left out."""
        cnn = self.model == "cnn"
        own: dict[str, Any] = {
            "steps": 1000 if cnn else 5000,
            "rate": 0.05 if cnn else 2.0,
            "batches": (0, 64) if cnn else (0,),
            "l2": 1e-3 if cnn else 1e-2,
            "removals": 20 if cnn else 50,
            "at_once": 1 if cnn else 64,  # convolutions of one run fill the cores
            "order": 1000 if cnn else 500,
            "step": 0.05 if cnn else 1.0,
        }
        return self.model_copy(update={name: value for name, value in own.items() if getattr(self, name) is None})


EXPERIMENT = Experiment(
    "influence",
    "Which training examples help or hurt everyone: predicted, and checked by retraining without them.",
    InfluenceStudy,
    defer("hyperpush.studies.influence.study:run_influence"),
)
