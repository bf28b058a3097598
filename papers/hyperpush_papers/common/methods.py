"""Methods built from shared options: each takes the options that it supports."""

import inspect
from collections.abc import Mapping
from typing import Any

import hyperpush as hp
from hyperpush.algorithms.base import Algorithm
from hyperpush.algorithms.pdbo import PDBO
from hyperpush.methods.registry import registered
from hyperpush_papers.common.config import Comparison, Privacy

NESTED = ("PDBO + HGP", "PDBO + TrackedHGP")


def fitting_options(
    kind: type, options: Mapping[str, Any], required: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return those given options that a class has; for missing options without default take the value in `required`."""
    parameters = inspect.signature(kind).parameters
    found = {name: value for name, value in options.items() if name in parameters and value is not None}
    missing = [name for name, each in parameters.items() if each.default is each.empty and name not in found]
    return found | {name: value for name, value in (required or {}).items() if name in missing}


def single_loops() -> dict[str, type[Algorithm]]:
    """Return the registered single-loop algorithms, which move params and hypers together, by name."""
    return {name: each for name, each in registered("algorithms").items() if not issubclass(each, PDBO)}


def single_loop(config: Comparison, name: str, outer: float, inner: float) -> Algorithm:
    """Return a single-loop algorithm with these step sizes."""
    local_rounds = max(1, config.iterations // config.local_steps)
    own = {
        "BSA": {"inner_steps": 3, "growth": 0},
        "FedBiO": {"steps": local_rounds},
        "FedBiOAcc": {"steps": local_rounds, "forget": 0.5},
        "FedNest": {"inner_steps": 3},
        "INTERACT": {"inner_steps": config.products},
        "SPDB": {"penalty": 0.5 / outer},
    }
    options = {
        "steps": config.iterations,
        "outer_step_size": outer,
        "inner_step_size": inner,
        "product_step_size": inner,
        "step_sizes": {"x": outer, "y": inner, "z": inner},
        "inverse": hp.algorithms.ConjugateGradients(config.products),
        "local_steps": config.local_steps,
        "period": 7,
        "tracked": True,
        "use": "reused",
        "step_scale": 0.7,
        "outer_momentum": 0.9,
        "inner_momentum": 0.8,
    }
    kind = single_loops()[name]
    return kind(**fitting_options(kind, options | own.get(name, {})))


def nested_loops(
    lengths: Comparison | Privacy,
    name: str,
    task: hp.Task,
    pushes: int,
    outer: float,
    inner: float,
    hgp_step: float,
    tracked_step: float | None = None,
) -> hp.PDBO | hp.CDBO:
    """Return PDBO with the estimator of this name, or CDBO if all clients share one hyper."""
    if name.endswith("TrackedHGP"):
        estimator = hp.TrackedHGP(lengths.order, tracked_step, pushes, tolerance=None)
    else:
        estimator = hp.HGP(lengths.order, pushes, hgp_step)
    options: Any = {
        "inner": hp.SGP(lengths.solver_steps, inner),
        "hypergradient": estimator,
        "outer": hp.optimizer("sgd", learning_rate=outer),
        "steps": lengths.outer_steps,
        "restart": False,
    }
    return hp.CDBO(**options, pushes=pushes) if task.common else hp.PDBO(**options)
