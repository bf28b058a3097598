"""A network outside the package: clients in a line, each linked to the clients beside it."""

from typing import ClassVar

import numpy as np

import hyperpush as hp


class Line(hp.networks.Listed):
    """Line network: client i and client i + 1 are linked in both directions; the two ends are not linked."""

    name: ClassVar[str] = "line"

    def __init__(self, clients: int):
        self.clients = clients
        left, right = np.arange(clients - 1), np.arange(1, clients)
        graph = hp.networks.adjacency(clients, np.concatenate([left, right]), np.concatenate([right, left]))
        self.table = hp.networks.LinkTable("clients", [graph])
