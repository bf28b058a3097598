"""Programs: nodes that describe one client's code, the context of its functions, and the count of costs."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
