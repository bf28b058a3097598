"""Personal models over a network: recipes, baselines, and the gain by cooperation (docs/guides/personalize.md)."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple

from hyperpush.base.config import Config
from hyperpush.runs.experiment import SweepRule, defer
from hyperpush_papers.common.options import (
    NONEMPTY,
    Count,
    Counts,
    NetworkOptions,
    NonNegative,
    Seed,
    Whole,
    option,
    study,
)

Estimator = Literal["", "hgp", "directed-rb", "vr-hgp", "tracked"]
Paper = Literal["personalized", "cooperative", "hypergradient"]


class Outer(NamedTuple):
    """Adam's learning rate for a recipe's hyper, and the L2 rate of its penalty."""

    rate: float
    l2: float


class Numbers(Config):
    """Numbers of steps and step sizes of all parts; 0 or a missing value takes the default of `size`."""

    clients: Whole = option(0, "Number of clients.")
    examples: Whole | None = option(0, "Examples of the data set, random ones.")
    steps: Whole = option(0, "Inner steps from the start.")
    again: Whole | None = option(0, "Inner steps after each outer step, from where training stands.")
    rounds: Whole = option(0, "Rounds of methods with local epochs.")
    outer_steps: Whole = option(0, "Outer steps.")
    batch: Whole = option(0, "Mini-batch size.")
    rate: NonNegative = option(0, "Inner learning rate of a single model.")
    ensemble_rate: NonNegative = option(0, "Inner learning rate of several models.")
    outer_rate: NonNegative | None = option(0, "Adam's rate for the hypers; 0: each recipe's own.")
    outer_on: Literal["train", "validation"] = option("train", "What the hypers are fitted to; the papers: train.")
    models: Whole = option(0, "Shared models of mtl, sgp-mtl, local-mtl and fedem; 0: 3.")
    recipes: dict[str, dict[str, Any]] = option({}, "Options of recipes, such as recipes.da.normalized = false.")
    prox: NonNegative = option(0, "FedProx's penalty on leaving the common model.")
    pull: NonNegative = option(0, "pFedMe's.")
    estimator: Estimator = option("", "Of the cooperative recipes; empty: HGP, or the paper's.")
    network_options: NetworkOptions = option({}, "Options of the network, such as probability and mixing.")
    order: Whole = option(0, "The estimator's order: M of the series, TrackedHGP's steps.")


class Setting(Numbers):
    """Complete settings of one comparison, without missing values.

    If `examples` is None, all examples are used. If `again` is None, each outer step trains `steps` from the start.
    """

    large: bool = False  # the papers' model instead of a small one
    step: float = 0.1  # η of the estimator
    l2: float = 1e-3
    # By recipe, or by product and recipe; other recipes have their own default optimizer.
    outer: Mapping[str, Outer] = option({"da+mtl:mtl": Outer(0.1, 1e-2), "da+mtl:da": Outer(0.1, 5e-4)})
    betas: tuple[float, float] = (0.9, 0.999)  # Adam's
    falls: tuple[float, float] = (5 / 6, 11 / 12)  # shares of the steps after which the step size falls to a tenth
    clusters: bool = True  # True: clusters of clients normalize their inputs differently (EMNIST)

    outer_rate: float | None = None
    models: int = 3
    prox: float = 0.1
    pull: float = 15.0
    estimator: Estimator = "hgp"
    order: int = 10


class Personalize(Numbers):
    """Options of the comparison of personal models; 0 or a missing option takes the value of `size`."""

    data: Literal["digits", "emnist", "cifar10", "cifar100", "shakespeare"] = option(
        "digits", "Data set; all but digits are read from HYPERPUSH_DATA."
    )
    network: str = option("random-directed", "Name of the network; the papers' are in docs/guides/personalize.md.")
    methods: Annotated[tuple[str, ...], NONEMPTY] = option(
        ("local", "sgp", "pl", "pl-direct", "mtl", "mtl-direct"),
        "What to compare; recipes combine, as in mtl+da+clean.",
    )
    size: Literal["small", "paper"] = option(
        "small", "Small models, fewer clients and a warm start between outer steps; or the papers'."
    )
    paper: Paper = option("personalized", "Whose settings size=paper takes: docs/guides/personalize.md.")
    seeds: Count = option(1, "Runs, each with a partition, network and model of its own.")
    seed: Seed = option(0, "The first of the seeds.")
    pushes: Counts = option((10,), "Pushes per order, S; recipes run once for each number.")
    at_a_time: Whole = option(0, "Clients computed at a time; 0: all of small models, else 1.")


EXPERIMENT = study(
    "personalize",
    "Personal models over a network: recipes and baselines, by average and 10 % client.",
    Personalize,
    tuning=SweepRule("validation_accuracy", ("accuracy", "accuracy_p10"), rates=("rate", "ensemble_rate")),
    check=defer("hyperpush_papers.personalize.study:check"),
)
