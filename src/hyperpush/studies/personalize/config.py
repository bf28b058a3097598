"""Personal models over a network: recipes, baselines, and what cooperation adds (docs/guides/personalize.md)."""

from collections.abc import Mapping
from typing import Literal, NamedTuple

from pydantic import Field

from hyperpush.runs.config import Config
from hyperpush.runs.experiment import Experiment, Tuning, defer
from hyperpush.studies.options import Count

Estimator = Literal["", "hgp", "directed-rb", "vr-hgp", "tracked"]
Paper = Literal["personalized", "cooperative", "hyper-gradient"]


class Outer(NamedTuple):
    """How the hypers of a method move: Adam's rate, and the rate of the penalty.

    The other two are those of weights of labels, where they are learned beside something else.
    """

    rate: float
    l2: float
    label_rate: float | None = None
    label_l2: float | None = None


class Numbers(Config):
    """How long and how fast everything runs; what is 0 or left out is the size's."""

    clients: int = Field(default=0, ge=0, description="Number of clients.")
    examples: int | None = Field(default=0, ge=0, description="Examples of the data set, random ones.")
    steps: int = Field(default=0, ge=0, description="Inner steps from the start.")
    again: int | None = Field(
        default=0, ge=0, description="Inner steps after each outer step, from where training stands."
    )
    rounds: int = Field(default=0, ge=0, description="Rounds of methods with local epochs.")
    outer_steps: int = Field(default=0, ge=0, description="Outer steps.")
    batch: int = Field(default=0, ge=0, description="Mini-batch size.")
    rate: float = Field(default=0, ge=0, description="Inner learning rate of a single model.")
    ensemble_rate: float = Field(default=0, ge=0, description="Inner learning rate of several models.")
    outer_rate: float | None = Field(default=0, ge=0, description="Adam's rate for the hypers; 0: each recipe's own.")
    prox: float = Field(default=0, ge=0, description="FedProx's penalty on leaving the common model.")
    pull: float = Field(default=0, ge=0, description="pFedMe's.")
    estimator: Estimator = Field(default="", description="Of the cooperative recipes; empty: HGP, or the paper's.")
    order: int = Field(default=0, ge=0, description="The estimator's order: M of the series, TrackedHGP's steps.")


class Setting(Numbers):
    """The numbers of one comparison, none of them left out.

    `examples` None: all there are. `again` None: `steps` from the start after each outer step.
    """

    large: bool = False  # the papers' model instead of a small one
    step: float = 0.1  # η of the estimator
    l2: float = 1e-3
    outer: Mapping[str, Outer] = {}  # by method; others move as their recipe says
    betas: tuple[float, float] = (0.9, 0.999)  # Adam's
    falls: tuple[float, float] = (5 / 6, 11 / 12)  # shares of the steps after which the rate falls to a tenth
    clusters: bool = True  # of clients whose inputs have a mean and standard deviation of their own (EMNIST)

    outer_rate: float | None = None
    prox: float = 0.1
    pull: float = 15.0
    estimator: Estimator = "hgp"
    order: int = 10


class Personalize(Numbers):
    """Options of the comparison of personal models; what is 0 or left out is the size's."""

    data: Literal["digits", "emnist", "cifar10", "cifar100", "shakespeare", "own"] = Field(
        default="digits", description="Data set; all but digits are read from HYPERPUSH_DATA, your own from `path`."
    )
    path: str = Field(default="", description="Your own data: a folder with a .npz for each client, or a .csv table.")
    client: str = Field(default="client", description="Column of your table that says whose a row is.")
    label: str = Field(default="label", description="Column of your table with the labels.")
    classes: int = Field(default=0, ge=0, description="Classes of your own data; 0: the largest label and one more.")
    network: str = Field(
        default="random-directed",
        description="fully-connected, static-undirected, random-undirected, random-directed, or another network.",
    )
    methods: tuple[str, ...] = Field(
        default=("local", "sgp", "pl", "pl-direct", "mtl", "mtl-direct"), min_length=1, description="What to compare."
    )
    size: Literal["small", "paper"] = Field(
        default="small", description="Small models, fewer clients and a warm start between outer steps; or the papers'."
    )
    paper: Paper = Field(
        default="personalized",
        description="Whose settings size=paper takes: docs/guides/personalize.md.",
    )
    seeds: Count = Field(default=1, description="Runs, each with a partition, network and model of its own.")
    seed: int = Field(default=0, ge=0, description="The first of the seeds.")
    pushes: tuple[Count, ...] = Field(
        default=(10,), min_length=1, description="Pushes per order, S; recipes run once for each number."
    )
    at_a_time: int = Field(default=0, ge=0, description="Clients computed at a time; 0: all of small models, else 1.")
    dry_run: bool = Field(default=False, description="Only say what it would cost.")


EXPERIMENT = Experiment(
    "personalize",
    "Personal models over a network: recipes and baselines, by average and 10 % client.",
    Personalize,
    defer("hyperpush.studies.personalize.study:run_personalize"),
    Tuning("validation_accuracy", ("accuracy", "accuracy_p10"), rates=("rate", "ensemble_rate")),
    defer("hyperpush.studies.personalize.study:check"),
)
