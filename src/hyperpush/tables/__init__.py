"""Tables of several parties: read them, make a task from them, or fit one linear model to them."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
