"""Networks with the links of a networkx graph."""

from typing import ClassVar

import equinox as eqx
import networkx as nx

from hyperpush.base.errors import InvalidInput
from hyperpush.networks.table import FixedGraph


class FromGraph(FixedGraph):
    """The links of a networkx graph: both ways for a Graph, one way for a DiGraph.

    **Use it** for a given graph, or one that networkx can make. **Avoid it** if links change: see
    `Trace`.

    Args:
        graph: At least 2 nodes, connected (strongly, if directed). Client i is the i-th node in the order of
            `graph.nodes`. Self-loops, repeated links and weights are ignored.
        mixing: Gossip weights of an undirected graph: `"metropolis"`, or `"fastest-mixing"` for up to 200 clients.

    Raises:
        InvalidInput: The graph is too small or not connected; the message names clients that cannot be reached.

    Example:
        >>> import networkx as nx
        >>> import hyperpush as hp
        >>> network = hp.networks.FromGraph(nx.karate_club_graph())
        >>> print(network.clients, network.directed, network.flood_rounds())
        34 False 5
    """

    name: ClassVar[str] = "graph"

    directed: bool = eqx.field(static=True)

    def __init__(self, graph: nx.Graph, mixing: str = "metropolis"):
        if not isinstance(graph, nx.Graph) or graph.number_of_nodes() < 2:
            raise InvalidInput("graph", graph, "a networkx Graph or DiGraph with at least 2 nodes")
        self.directed = graph.is_directed()
        if self.directed and mixing != "metropolis":
            raise InvalidInput("mixing", mixing, "no choice on a directed graph: it has push weights only")
        super().__init__("graph", graph, mixing)
