"""Local differential privacy: noise, how much one example can change what is sent, what it costs, and an attack."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
