"""How long and how fast everything runs: small sizes, and the settings of three papers."""

from collections.abc import Mapping
from typing import Literal, NamedTuple

from hyperpush.errors import InvalidInput
from hyperpush.personalize.published import NETWORKS
from hyperpush.personalize.recipe import Outer

Kind = Literal["server", "gossip", "push"]
Estimator = Literal["hgp", "directed-rb", "vr-hgp", "tracked"]
Paper = Literal["personalized", "cooperative", "hyper-gradient"]


class Setting(NamedTuple):
    """Numbers of one comparison."""

    clients: int
    examples: int | None  # of the data set; None: all
    large: bool  # the papers' model instead of a small one
    steps: int  # of SGP, or alone
    rounds: int  # of FedAvg and other methods with local epochs
    again: int | None  # SGP steps after each outer step, from where it stands; None: `steps` from the start
    outer_steps: int
    batch: int
    rate: float
    ensemble_rate: float  # of several models: each gets a part of the gradient
    order: int  # of the estimator: M
    step: float  # η
    l2: float = 1e-3
    outer_rate: float | None = None  # of every recipe; None: those of `outer`, or the recipe's own
    outer: Mapping[str, Outer] = {}
    betas: tuple[float, float] = (0.9, 0.999)  # Adam's
    prox: float = 0.1  # FedProx's penalty on leaving the common model
    pull: float = 15.0  # pFedMe's
    estimator: Estimator = "hgp"
    falls: tuple[float, float] = (5 / 6, 11 / 12)  # shares of the steps after which the rate falls to a tenth
    clusters: bool = True  # of clients whose inputs have a mean and standard deviation of their own (EMNIST)


def small(data: str, owners: int = 0) -> Setting:
    """Of our own: a small model, a warm start between outer steps; `owners` are the clients of your own data."""
    return {
        "digits": Setting(20, None, False, 150, 20, 150, 8, 32, 0.3, 1.0, 10, 0.1),
        "emnist": Setting(20, 14_000, False, 600, 60, 60, 5, 32, 0.1, 0.5, 10, 0.1),
        "cifar10": Setting(20, 15_000, False, 600, 60, 60, 5, 64, 0.1, 0.3, 10, 0.1),
        "cifar100": Setting(20, 10_000, False, 600, 60, 60, 5, 64, 0.1, 0.3, 10, 0.1),
        "shakespeare": Setting(20, 10_000, False, 300, 60, 30, 5, 64, 1.0, 3.0, 10, 0.1),
        "own": Setting(owners, None, False, 600, 60, 60, 8, 32, 0.1, 0.5, 10, 0.1),
    }[data]


def of_paper(paper: Paper, data: str, network: str, by: Kind) -> Setting:
    """A paper's setting for a data set and a network, `by` its averaging; from the start before every outer step.

    What a paper leaves open is taken from the others: docs/personalize.md says what.
    """
    if data == "digits" and paper == "personalized":  # no paper's: a larger model of the data that ship
        return Setting(20, None, True, 600, 200, None, 20, 128, 0.1, 0.5, 200, 0.1)
    of_data = {"hyper-gradient": ("emnist",)}.get(paper, ("emnist", "cifar10", "cifar100", "shakespeare"))
    if data not in of_data:
        raise InvalidInput("data", data, f"what the paper has (paper={paper}): {', '.join(of_data)}")
    had = NETWORKS if data == "emnist" and paper != "cooperative" else ("random-directed",)
    if network not in had:
        raise InvalidInput("network", network, f"what the paper has for {data} (paper={paper}): {', '.join(had)}")
    if paper == "personalized":
        return _personalized(data, by)
    return _cooperative(data) if paper == "cooperative" else _hyper_gradient(by)


def _personalized(data: str, by: Kind) -> Setting:
    """Appendix D and table 2; for other data than EMNIST appendix G, and the inner problem of `_cooperative`."""
    if data == "emnist":
        rates = (0.05, 0.25) if by == "push" else (0.0316, 0.1)
        made = Setting(100, 81_425, True, 600, 200, None, 20, 128, *rates, order=200, step=0.1, clusters=False)
    else:
        made = _cooperative(data)._replace(outer_steps=20, betas=(0.9, 0.999))
    models = 0.1 if by == "push" else 1.0
    outer = {
        "da": Outer(0.1, 0.0),
        "mtl": Outer(models, 0.01),
        "mtl-da": Outer(models, 0.01, 0.1, 5e-4),
    }
    return made._replace(outer=outer, estimator="vr-hgp" if by == "push" else "directed-rb")


def _cooperative(data: str) -> Setting:
    """Appendix A and its table 2; all of its models are ensembles."""
    clients, examples, steps, outer_steps, rate, order = {
        "emnist": (100, 81_425, 600, 5, 0.5, 200),
        "cifar10": (20, None, 1200, 10, 0.1, 20),
        "cifar100": (20, None, 1200, 10, 0.2, 20),
        "shakespeare": (20, None, 1200, 10, 10.0, 20),
    }[data]
    made = Setting(clients, examples, True, steps, 200, None, outer_steps, 128, rate, rate, order, 0.1)
    falls = 1 - 100 / steps, 1 - 50 / steps
    return made._replace(outer={"mtl": Outer(1.0, 0.01)}, betas=(0.9, 0.99), estimator="directed-rb", falls=falls)


def _hyper_gradient(by: Kind) -> Setting:
    """Appendix A.3 and table 6; of table 7 the rates of its own two methods."""
    if by == "push":
        rates, step, outer = (0.1, 0.5), 0.1, {"pl": Outer(0.1, 1e-3), "mtl": Outer(0.1, 1e-2)}
    else:
        rates, step, outer = (0.0316, 0.1), 0.01, {"pl": Outer(0.1, 1e-2), "mtl": Outer(1.0, 1e-2)}
    return Setting(100, 81_425, True, 600, 200, None, 5, 128, *rates, order=10, step=step, outer=outer)
