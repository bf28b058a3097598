"""Which training examples help or hurt everyone: predicted without moving data, checked by retraining without them.

The counterpart of section 5.2 and appendix A.2 of Terashita and Hara, "Decentralized hyper-gradient computation over
time-varying directed networks"; then groups, whole clients, damping, and a hunt for wrong labels
(docs/results/influence.md).
"""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from hyperpush.errors import InvalidInput
from hyperpush.runs.config import Config
from hyperpush.studies.options import Count, Positive, Precision, Several, option, study


class Hunt(Config):
    """The hunt for wrong labels on scikit-learn's digits."""

    seeds: int = option(3, "How often, with data and flips of their own; 0: not at all.", ge=0)
    clients: Several = option(5, "Number of clients.")
    noisy: Count = option(2, "How many of them have wrong labels.")
    share: float = option(0.1, "Share of their labels that is wrong.", gt=0, lt=1)
    kinds: tuple[Literal["random", "systematic"], ...] = option(
        ("random", "systematic"),
        "Wrong labels: random ones, or those of neighbors in the order of labels become the next label.",
        min_length=1,
    )
    damping: float = option(0.01, "Added to the mean Hessian.", ge=0)
    steps: Count = option(2000, "Steps of stochastic gradient push.")
    rate: Positive = option(0.5, "Its first learning rate.")
    l2: Positive = option(1e-3, "L2 rate of the softmax regression.")

    @model_validator(mode="after")
    def _enough_clients(self) -> "Hunt":
        if self.noisy > self.clients:
            raise InvalidInput("hunt.noisy", self.noisy, f"at most {self.clients}, the clients")
        return self


class InfluenceStudy(Config):
    """Options of the study of influence; what is left out depends on the model."""

    model: Literal["logistic", "cnn"] = option("logistic", "What is trained.")
    clients: Several = option(3, "Number of clients.")
    network: str = option("random-directed", "Name of the network.")
    network_options: dict[str, Any] = option({}, "Options of the network, such as probability.")
    examples: Several = option(100, "Logistic regression: training examples per client, and as many for validation.")
    data: Literal["auto", "emnist", "mnist", "digits"] = option(
        "auto", "CNN: images of digits; auto is EMNIST if HYPERPUSH_DATA has it, else scikit-learn's."
    )
    images: Annotated[int, Field(ge=20)] = option(
        600, "CNN: images in all, of which 60 % are for training and 20 % for validation."
    )
    concentration: Positive = option(0.4, "CNN: of the Dirichlet split of each label's images.")
    steps: Count | None = option(None, "Steps of SGP: 5000, CNN 1000.")
    rate: Positive | None = option(None, "Its first learning rate: 2, CNN 0.05.")
    batches: tuple[Annotated[int, Field(ge=0)], ...] | None = option(
        None, "Batch sizes to train with, 0 for all examples: [0], CNN [0, 64].", min_length=1
    )
    l2: Annotated[float, Field(ge=0)] | None = option(None, "L2 rate: 0.01, CNN 0.001.")
    removals: Count | None = option(None, "Examples to remove one by one: 50, CNN 20.")
    at_once: Count | None = option(None, "Retrainings side by side: 64, CNN 1.")
    damping: float = option(0.0, "Added to the mean Hessian.", ge=0)
    dampings: tuple[Annotated[float, Field(ge=0)], ...] = option(
        (0.0, 0.01, 0.1, 1.0), "Others, whose effect is measured."
    )
    order: Count | None = option(None, "HGP's order, and most steps of TrackedHGP: 500, CNN 1000.")
    pushes: Count = option(100, "HGP's pushes per order.")
    step: Positive | None = option(None, "HGP's step: 1, CNN 0.05.")
    unrolled: bool = option(True, "Also differentiate the training run itself, by ITDBackward.")
    groups: tuple[Count, ...] = option((5, 20, 60), "Sizes of groups to remove together.")
    leave: bool = option(True, "Also let every client leave once.")
    hunt: Hunt = Hunt()
    seed: int = option(0, "Decides the data, the network and every draw.", ge=0)
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


EXPERIMENT = study(
    "influence",
    "Which training examples help or hurt everyone: predicted, and checked by retraining without them.",
    InfluenceStudy,
)
