"""Decentralized bilevel optimization: clients compute hypergradients by exchanging only vectors, peer to peer.

`__init__.pyi` lists the public names. Each name is imported at its first use, so that the command line starts quickly.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
