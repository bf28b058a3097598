"""Local differential privacy: noise, sensitivity to one example, the budget ε, and an attack that tests it."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
