"""Decentralized bilevel optimization: hypergradients among clients that exchange only vectors, peer to peer.

What is public is listed in `__init__.pyi`; each name is imported when it is first used, so that the command line starts
at once.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
