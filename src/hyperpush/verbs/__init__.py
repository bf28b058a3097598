"""The verbs (train, hypergradient, solve, tune, check), their results, and run folders."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(__name__, submodules=["hooks"])
