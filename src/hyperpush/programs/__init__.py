"""Algorithms as what one client does: the nodes of a program, what a leaf may know, and what a program costs."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
