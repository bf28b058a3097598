"""Names for writing a new method, besides the program nodes: base classes, states, problems, data, option types.

Each name is imported at its first use, like the names of `hyperpush` itself. Type checkers read `extend.pyi`.
`lazy_loader` does not support this module, because it resolves names only within one package.
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
