"""Erdős–Rényi networks: a random graph that is drawn once."""

from typing import ClassVar

import equinox as eqx
import networkx as nx
import numpy as np

from hyperpush.base.checks import check_integer, check_probability
from hyperpush.base.errors import InvalidInput
from hyperpush.networks.table import FixedGraph

_DRAWS = 1000


class StaticUndirected(FixedGraph):
    """An Erdős–Rényi graph G(n, p): each pair of clients is linked with probability p, drawn once.

    The graph is drawn from `seed` until it is connected, which p of about ln n / n and more makes likely.
    **Use it** as a fixed network without structure. **Avoid it** to model links that fail: see `RandomUndirected`.

    Args:
        clients: n, at least 2.
        probability: p, from 0 to 1. 1 links all pairs; values at which no drawn graph is connected are refused.
        seed: Seed of the graph, 0 or more. The run's key has no effect.
        mixing: Gossip weights: `"metropolis"`, or `"fastest-mixing"` for up to 200 clients.

    Raises:
        InvalidInput: An option is out of range, or none of 1,000 graphs was connected.

    Example:
        >>> import hyperpush as hp
        >>> print(hp.networks.StaticUndirected(20, 0.3, seed=1).flood_rounds())
        4
    """

    name: ClassVar[str] = "static-undirected"

    probability: float = eqx.field(static=True)
    seed: int = eqx.field(static=True)

    def __init__(self, clients: int, probability: float | int = 0.4, seed: int = 0, mixing: str = "metropolis"):
        clients = check_integer("clients", clients, minimum=2)
        self.probability = check_probability("probability", probability)
        self.seed = check_integer("seed", seed, minimum=0)
        super().__init__("probability", _draw_connected(clients, self.probability, seed), mixing)


def _draw_connected(clients: int, probability: float, seed: int) -> nx.Graph:
    random = np.random.default_rng(seed)
    for _ in range(_DRAWS):
        graph = nx.fast_gnp_random_graph(clients, probability, seed=random)
        if nx.is_connected(graph):
            return graph
    allowed = f"large enough for {clients} clients: none of {_DRAWS} graphs was connected"
    raise InvalidInput("probability", probability, allowed)
