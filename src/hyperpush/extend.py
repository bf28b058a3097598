"""What a method of your own needs besides the nodes: base classes, states, problems, data, and options with a range.

Each name is imported when it is first used, like those of `hyperpush` itself; `extend.pyi` tells type checkers. These
names come from many rows, which `lazy_loader` does not support outside of the package that it keeps them in.
"""

from importlib import import_module
from typing import Any

NAMES = {
    "algorithms.base": ["Algorithm", "BilevelState"],
    "base.numbers": ["Number", "as_number"],
    "base.ranges": ["Count", "NonNegative", "OptionalCount", "OptionalPositive", "Positive", "Probability", "Whole"],
    "base.schedules": ["Rate", "Share", "step_size_at"],
    "data.batches": ["Data", "Ragged", "minibatch", "full_batch", "ragged"],
    "engines.simulate": ["evaluate"],
    "hypergradients.base": ["HypergradientEstimator", "HypergradientState", "outer_gradient_shares"],
    "inner.base": ["InnerSolver", "InnerState"],
    "methods.base": ["Method", "MethodInfo", "info_by_options"],
    "networks": ["Network"],
    "networks.link_estimates": ["LinkEstimates"],
    "task.problem": ["Problem"],
    "verbs.run": ["Ran", "run"],
}
_MODULES = {name: module for module, names in NAMES.items() for name in names}
__all__ = sorted(_MODULES)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"hp.extend has no {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(f"hyperpush.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return list(__all__)
