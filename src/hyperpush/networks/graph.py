"""Any graph, from networkx."""

from typing import ClassVar

import equinox as eqx
import networkx as nx
import numpy as np

from hyperpush.errors import InvalidInput
from hyperpush.networks.table import Listed, Table, adjacency
from hyperpush.networks.weights import doubly_stochastic


class FromGraph(Listed):
    """The links of a networkx graph: both ways for a Graph, one way for a DiGraph.

    Client i is the i-th node in the order of `graph.nodes`. Links from a node to itself and repeated links count for
    nothing. `mixing` chooses the gossip weights of an undirected graph: "metropolis" or "fastest-mixing".
    """

    name: ClassVar[str] = "graph"
    varying: ClassVar[bool] = False

    clients: int = eqx.field(static=True)
    directed: bool = eqx.field(static=True)
    mixing: str = eqx.field(static=True)
    table: Table

    def __init__(self, graph: nx.Graph, mixing: str = "metropolis"):
        if not isinstance(graph, nx.Graph) or graph.number_of_nodes() < 2:
            raise InvalidInput("graph", graph, "a networkx Graph or DiGraph with at least 2 nodes")
        self.clients = graph.number_of_nodes()
        self.directed = graph.is_directed()
        if self.directed and mixing != "metropolis":
            raise InvalidInput("mixing", mixing, "no choice on a directed graph: it has push weights only")
        self.mixing = mixing
        numbers = {node: number for number, node in enumerate(graph)}
        ends = np.array([(numbers[sender], numbers[receiver]) for sender, receiver in graph.to_directed(True).edges()])
        simple = adjacency(self.clients, *ends.reshape(-1, 2).T)
        self.table = Table("graph", [simple], None if self.directed else [doubly_stochastic(simple, mixing)])
