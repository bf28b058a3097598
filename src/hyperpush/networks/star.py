"""Everybody talks to one client only."""

from typing import ClassVar

import equinox as eqx
import numpy as np

from hyperpush.checks import check_integer
from hyperpush.networks.table import Listed, Table, adjacency
from hyperpush.networks.weights import doubly_stochastic


class Star(Listed):
    """0 ↔ i for every other client i. `mixing` chooses the gossip weights: "metropolis" or "fastest-mixing"."""

    name: ClassVar[str] = "star"
    directed: ClassVar[bool] = False
    varying: ClassVar[bool] = False

    clients: int = eqx.field(static=True)
    mixing: str = eqx.field(static=True)
    table: Table

    def __init__(self, clients: int, mixing: str = "metropolis"):
        self.clients = check_integer("clients", clients, minimum=2)
        self.mixing = mixing
        leaves, hub = np.arange(1, clients), np.zeros(clients - 1, int)
        graph = adjacency(clients, np.concatenate([hub, leaves]), np.concatenate([leaves, hub]))
        self.table = Table("clients", [graph], [doubly_stochastic(graph, mixing)])
