"""Programs: the nodes of one client's code, the context of a leaf, and the costs."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
