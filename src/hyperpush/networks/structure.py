"""Graphs of neighboring clients in a federation, which may change from round to round."""

from typing import Any, final

import jax.numpy as jnp
import networkx as nx
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from hyperpush.base.errors import InvalidInput


@final
class Graph:
    """An undirected, weighted graph of neighbors, without self-loops.

    Two graphs are equal if their weights and present clients are equal.

    Args:
        weights: Weights of the links, 0 or more: an array n×n, or T×n×n for a graph that changes. Round k has the
            links of step k mod T.
        present: An array T×n that is True for clients that take part in a step; links of other clients are ignored.
            None means that all clients take part in every step.

    Raises:
        InvalidInput: The weights are not an undirected graph, or a step has no present client.

    Example:
        >>> import networkx as nx
        >>> import hyperpush as hp
        >>> hp.networks.Graph.of(nx.cycle_graph(5))
        Graph(5 clients, 1 steps)
    """

    def __init__(self, weights: Any, present: Any = None):
        given = np.asarray(weights, np.float32)
        given = given[None] if given.ndim == 2 else given
        if given.ndim != 3 or given.shape[1] != given.shape[2] or given.shape[1] < 2 or not len(given):
            raise InvalidInput("graph.weights", np.shape(weights), "n×n or T×n×n numbers, n ≥ 2")
        if not np.isfinite(given).all() or given.min() < 0:
            raise InvalidInput("graph.weights", "negative, infinite or not a number", "finite numbers, 0 or more")
        if not np.array_equal(given, given.transpose(0, 2, 1)):
            raise InvalidInput("graph.weights", "not symmetric", "an undirected graph")
        if given.diagonal(axis1=1, axis2=2).any():
            raise InvalidInput("graph.weights", "a link from a client to itself", "zeros on the diagonal")
        here = np.ones(given.shape[:2], bool) if present is None else np.asarray(present)
        if here.shape != given.shape[:2] or here.dtype != bool:
            raise InvalidInput("graph.present", f"{here.dtype}{list(here.shape)}", f"bool{list(given.shape[:2])}")
        if not here.any(1).all():
            raise InvalidInput(
                "graph.present", f"no client in step {np.argmin(here.any(1))}", "at least one client in every step"
            )
        self.weights: Float[np.ndarray, "t n n"] = given * here[:, None] * here[:, :, None]
        self.present: Bool[np.ndarray, "t n"] = here
        self._content = (given.shape, self.weights.tobytes(), here.tobytes())
        self._hash = hash(self._content)

    @staticmethod
    def of(graph: nx.Graph, weight: str | None = None) -> "Graph":
        """Convert a networkx graph; `weight` names the attribute with the weights of links (None: all 1)."""
        return Graph(nx.to_numpy_array(graph, weight=weight))  # pyright: ignore[reportArgumentType]

    @property
    def clients(self) -> int:
        return self.weights.shape[1]

    def at(self, round: Int[Array, ""] | int) -> tuple[Float[Array, "n n"], Bool[Array, " n"]]:
        """Return the weights of the links in a round, and which clients take part in it."""
        step = jnp.asarray(round) % len(self.weights)
        return jnp.asarray(self.weights, jnp.zeros(()).dtype)[step], jnp.asarray(self.present)[step]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Graph) and self._content == other._content

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return f"Graph({self.clients} clients, {len(self.weights)} steps)"
