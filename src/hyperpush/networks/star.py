"""A star: all other clients are linked to one client."""

from typing import ClassVar

import networkx as nx

from hyperpush.base.checks import check_integer
from hyperpush.networks.table import FixedGraph


class Star(FixedGraph):
    """A star: 0 ↔ i for every other client i, at every step.

    **Use it** to model a hub. **Avoid it** for averages: with n − 1 links at one client, 1 − |λ₂| is about 1/n. To
    model a server that computes the mean, use `averaging="exact"`.

    Args:
        clients: n, at least 2.
        mixing: Gossip weights: `"metropolis"`, or `"fastest-mixing"` for up to 200 clients.

    Example:
        >>> import hyperpush as hp
        >>> print(hp.networks.Star(9).flood_rounds())
        2
    """

    name: ClassVar[str] = "star"

    def __init__(self, clients: int, mixing: str = "metropolis"):
        super().__init__("clients", nx.star_graph(check_integer("clients", clients, minimum=2) - 1), mixing)
