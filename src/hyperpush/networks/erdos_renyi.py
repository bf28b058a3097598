"""One random graph, drawn once."""

from typing import ClassVar

import equinox as eqx
import networkx as nx
import numpy as np
import scipy.sparse

from hyperpush import checks
from hyperpush.errors import InvalidInput
from hyperpush.networks.table import Listed, Table
from hyperpush.networks.weights import doubly_stochastic

_DRAWS = 1000


class StaticUndirected(Listed):
    """An Erdős–Rényi graph: each undirected link exists with the given probability; drawn from `seed` until connected.

    `mixing` chooses the gossip weights: "metropolis" or "fastest-mixing".
    """

    name: ClassVar[str] = "static-undirected"
    directed: ClassVar[bool] = False
    varying: ClassVar[bool] = False

    clients: int = eqx.field(static=True)
    probability: float = eqx.field(static=True)
    seed: int = eqx.field(static=True)
    mixing: str = eqx.field(static=True)
    table: Table

    def __init__(self, clients: int, probability: float | int = 0.4, seed: int = 0, mixing: str = "metropolis"):
        self.clients = checks.check_integer("clients", clients, minimum=2)
        self.probability = checks.check_probability("probability", probability)
        self.seed = checks.check_integer("seed", seed, minimum=0)
        self.mixing = mixing
        graph = _connected(self.clients, self.probability, np.random.default_rng(seed))
        self.table = Table("probability", [graph], [doubly_stochastic(graph, mixing)])


def _connected(clients: int, probability: float, random: np.random.Generator) -> scipy.sparse.csr_array:
    for _ in range(_DRAWS):
        graph = nx.fast_gnp_random_graph(clients, probability, seed=random)
        if nx.is_connected(graph):
            return nx.to_scipy_sparse_array(graph, dtype=bool, format="csr")
    raise InvalidInput(
        "probability", probability, f"large enough for {clients} clients: none of {_DRAWS} graphs was connected"
    )
