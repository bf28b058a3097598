"""Settings of the comparison of personal models: our small sizes, and those of three papers."""

from dataclasses import replace
from typing import Literal

from hyperpush.base.errors import InvalidInput
from hyperpush_papers.personalize.config import Outer, Paper, Setting
from hyperpush_papers.personalize.published import NETWORKS

Kind = Literal["server", "gossip", "push"]
COLUMNS = ("clients", "examples", "steps", "rounds", "again", "outer_steps", "batch", "rate", "ensemble_rate")
SMALL = {
    "digits": (20, None, 150, 20, 150, 8, 32, 0.3, 1.0),
    "emnist": (20, 14_000, 600, 60, 60, 5, 32, 0.1, 0.5),
    "cifar10": (20, 15_000, 600, 60, 60, 5, 64, 0.1, 0.3),
    "cifar100": (20, 10_000, 600, 60, 60, 5, 64, 0.1, 0.3),
    "shakespeare": (20, 10_000, 300, 60, 30, 5, 64, 1.0, 3.0),
}
COOPERATIVE = {  # settings in appendix A and table 2 of that paper
    "emnist": (100, 81_425, 600, 200, None, 5, 128, 0.5, 0.5),
    "cifar10": (20, None, 1200, 200, None, 10, 128, 0.1, 0.1),
    "cifar100": (20, None, 1200, 200, None, 10, 128, 0.2, 0.2),
    "shakespeare": (20, None, 1200, 200, None, 10, 128, 10.0, 10.0),
}


def small(data: str) -> Setting:
    """Return our settings: a small model, and training that continues from the previous outer step."""
    return Setting(**dict(zip(COLUMNS, SMALL[data], strict=True)))


def of_paper(paper: Paper, data: str, network: str, by: Kind) -> Setting:
    """Return a paper's settings for a data set and a network; every outer step trains from the start.

    Settings that a paper does not state come from the other papers: docs/guides/personalize.md lists them.
    """
    if data == "digits" and paper == "personalized":  # in no paper: our larger model for the digits of scikit-learn
        return _large((20, None, 600, 200, None, 20, 128, 0.1, 0.5), order=200)
    of_data = ("emnist",) if paper == "hypergradient" else tuple(COOPERATIVE)
    if data not in of_data:
        raise InvalidInput("data", data, f"what the paper has (paper={paper}): {', '.join(of_data)}")
    had = NETWORKS if data == "emnist" and paper != "cooperative" else ("random-directed",)
    if network not in had:
        raise InvalidInput("network", network, f"what the paper has for {data} (paper={paper}): {', '.join(had)}")
    if paper == "cooperative":
        return _cooperative(data)
    made = _personal_setting(data, by) if paper == "personalized" else _hypergradient(by)
    static = {"mixing": "fastest-mixing"} if network == "static-undirected" else {}  # Boyd, Diaconis and Xiao 2004
    return replace(made, network_options=static)


def _large(numbers: tuple[float | None, ...], **more: object) -> Setting:
    return Setting(**{**dict(zip(COLUMNS, numbers, strict=True)), "large": True, **more})


def _personal_setting(data: str, by: Kind) -> Setting:
    """Return the settings of appendix D and table 2; by appendix G.1, data other than EMNIST take M = 20."""
    rates = (0.05, 0.25) if by == "push" else (0.0316, 0.1)
    size, order = ((100, 81_425), 200) if data == "emnist" else ((20, None), 20)
    made = _large((*size, 600, 200, None, 20, 128, *rates), order=order, clusters=False)
    models = 0.1 if by == "push" else 1.0
    outer = {"da": Outer(0.1, 0.0), "mtl": Outer(models, 0.01), "da+mtl:da": Outer(0.1, 5e-4)}
    return replace(made, outer=outer, estimator="vr-hgp" if by == "push" else "directed-rb")


def _cooperative(data: str) -> Setting:
    """Return the settings of the cooperative paper; all its models are ensembles."""
    steps = 600 if data == "emnist" else 1200
    return _large(
        COOPERATIVE[data],
        order=200 if data == "emnist" else 20,
        outer={"mtl": Outer(1.0, 0.01)},
        betas=(0.9, 0.99),
        estimator="directed-rb",
        falls=(1 - 100 / steps, 1 - 50 / steps),
    )


def _hypergradient(by: Kind) -> Setting:
    """Return the settings of appendix A.3 and table 6, and from table 7 the rates of the paper's two methods."""
    if by == "push":
        rates, step, outer = (0.1, 0.5), 0.1, {"pl": Outer(0.1, 1e-3), "mtl": Outer(0.1, 1e-2)}
    else:
        rates, step, outer = (0.0316, 0.1), 0.01, {"pl": Outer(0.1, 1e-2), "mtl": Outer(1.0, 1e-2)}
    return _large((100, 81_425, 600, 200, None, 5, 128, *rates), order=10, step=step, outer=outer)
