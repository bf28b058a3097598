"""Ties: a graph of the parties whose neighbors should have similar hypers."""

from dataclasses import replace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import networkx as nx
import numpy as np
from jaxtyping import Array, Bool, PyTree

from hyperpush.base.errors import InvalidInput, unknown
from hyperpush.base.numbers import as_number
from hyperpush.base.options import Configured
from hyperpush.base.ranges import NonNegative
from hyperpush.networks import Network
from hyperpush.networks.structure import Graph
from hyperpush.programs import Context, Exchange, Inbox, Node
from hyperpush.task.problem import Problem


def as_links(given: Any) -> Any:
    """Return the links of a graph as tuples (u, v) or (u, v, weight).

    An isolated networkx node becomes a link of weight 0 to itself, so that its name is checked, too. NumPy numbers
    become Python numbers. Values other than graphs and lists are returned unchanged.
    """
    if isinstance(given, nx.Graph) and not given.is_directed():
        alone = ((node, node, 0.0) for node in nx.isolates(given))
        given = [*given.edges(data="weight", default=1.0), *alone]
    if not isinstance(given, tuple | list):
        return given
    links = (link if isinstance(link, tuple | list) else (link,) for link in given)
    return tuple(tuple(each.item() if isinstance(each, np.generic) else each for each in link) for link in links)


class Neighbors(eqx.Module):
    """The other clients' hypers, as a client last received them."""

    hypers: PyTree  # by sender, on axis 0; zeros before the first message
    known: Bool[Array, " n"]  # True for senders with at least one message


class Ties(Configured):
    """A graph of the parties with a penalty on differences between neighbors' hypers.

    The clients then minimize the mean outer cost F̄ plus the penalty:

        F̄(λ) + Σ_{u<v} a_uv ‖λ_u − λ_v‖²,    a_uv = strength · weight of the link between u and v

    So 2 Σ_v a_uv (λ_u − λ_v) is added to client u's hypergradient, with the λ_v that u last received. In every outer
    step clients send their hypers once over the network's live links. Without a new message a client uses the last
    value; before the first message the tie has no effect. So PDBO stops moving only where the hypergradient and the
    gradient of the whole penalty add up to zero, even if links are rarely up.

    **Use it** as `ties=` of `PDBO` if similar clients are known, and clients have too few examples to fit hypers alone.
    **Avoid it** where hypers are secret: all clients within the network's reach receive them, neighbor or not. Every
    client keeps a copy of all tied hypers.

    The strength cannot be learned as a hyper: it would go to zero. Choose it on a holdout set:
    `hp.tune(…, over={"ties.strength": [0.0, 0.01, 0.1]}, on="holdout")`. A new strength needs no recompilation.

    Args:
        graph: Links between neighbors. Give a list such as `[("north", "south"), ("south", "east", 0.5)]` by names or
            numbers; a pair has weight 1. Or give an undirected networkx graph of names or numbers, or an
            `hp.networks.Graph`, which may change from step to step. A party that knows only its own neighbors gives its
            own links. The network must be able to carry messages both ways along every link.
        strength: Factor of all ties, 0 or more. With 0 the ties have no effect, but messages are still sent. F̄ is a
            mean, so its derivative by one client's hypers falls like 1/n, and so does a useful strength. Estimators
            of the client's own cost F_i, such as `LocalGradient`, need n times the strength for the same effect.
        entries: Names of the tied entries of the hypers, such as `("mtl",)`. None ties all except those with one number
            per training example, which mean nothing to other clients.

    Raises:
        InvalidInput: An option is out of range; the message names it and what is allowed.

    Example:
        Clients fit 0, 3 and 7 alone. The first two are tied, and meet halfway.

        >>> import jax.numpy as jnp
        >>> import hyperpush as hp
        >>> task = hp.Task(
        ...     inner=lambda x, own, a: (x - a) ** 2, outer=lambda x, own, b: (own - b) ** 2, params=0.0, hypers=0.0,
        ...     train=jnp.zeros((3, 1)), validation=jnp.array([[0.0], [3.0], [7.0]]),
        ... )
        >>> method = hp.PDBO(
        ...     inner=hp.LocalSGD(steps=1, step_size=0.1), hypergradient=hp.hypergradients.LocalGradient(),
        ...     outer=hp.optimizer("sgd", learning_rate=0.1), steps=100,
        ...     ties=hp.algorithms.Ties([(0, 1)], strength=1.0),
        ... )
        >>> print(hp.solve(task, method, hp.networks.FullyConnected(3), key=0).hypers.round(2))
        [1. 2. 7.]
    """

    graph: Graph | tuple | list | nx.Graph = eqx.field(static=True, converter=as_links)
    strength: NonNegative = eqx.field(converter=as_number)
    entries: tuple[str, ...] | None = eqx.field(
        static=True, default=None, converter=lambda given: tuple(given) if isinstance(given, list) else given
    )

    def __check_init__(self):
        if self.entries == ():
            raise InvalidInput("Ties.entries", (), "names of entries of the hypers, or None")
        if isinstance(self.graph, nx.Graph):
            raise InvalidInput("Ties.graph", "a directed graph", "an undirected one, because ties are undirected")
        for link in () if isinstance(self.graph, Graph) else self.graph:
            fits = len(link) in (2, 3) and all(isinstance(end, str | int) for end in link[:2])
            if not fits or not all(isinstance(w, int | float) and 0 <= w < np.inf for w in link[2:]):
                allowed = "links of two parties, and a weight of 0 or more if it is not 1: (u, v) or (u, v, weight)"
                raise InvalidInput("Ties.graph", link, allowed)

    def among(self, task: Any) -> "Ties":
        """Return the ties with the graph of a task's parties; refuse unknown parties and entries."""
        names = None if self.entries is None else set(self.entries)
        if names and not isinstance(task.hypers, dict):
            raise InvalidInput("ties.entries", self.entries, "None, because the task's hypers are not a dict")
        for name in names or ():
            if name not in task.hypers:
                raise unknown("ties.entries", name, task.hypers)
        tied = jax.tree.leaves(self.select(task.hypers, task.by_example))
        wanted = jax.tree.leaves(self.select(task.hypers, ()))
        if not tied or (names and len(tied) < len(wanted)):
            given = sorted(names) if names else "hypers with one number per training example"
            raise InvalidInput("ties.entries", given, "entries that do not belong to single examples")
        return replace(self, graph=self._graph_of(task))

    def _graph_of(self, task: Any) -> Graph:
        if isinstance(self.graph, Graph):
            if self.graph.clients != task.clients:
                given = f"a graph of {self.graph.clients} parties"
                raise InvalidInput("ties.graph", given, f"one of {task.clients} parties, as in the task")
            return self.graph
        weights = np.full((task.clients, task.clients), np.nan, np.float32)
        for one, other, *weight in self.graph:
            for end in (one, other):
                if end not in task.names and end not in range(task.clients):
                    raise unknown("ties.graph", str(end), task.names)
            u, v = task.client(one), task.client(other)
            if not np.isnan(weights[u, v]) or (u == v and weight != [0]):
                given = f"a link {one!r} – {other!r}" + (" again" if u != v else "")
                raise InvalidInput("ties.graph", given, "each pair of different parties at most once")
            weights[u, v] = weights[v, u] = weight[0] if weight else 1
        return Graph(np.nan_to_num(weights))

    def check_network(self, network: Network, task: Any) -> None:
        """Refuse links of the graph that the network can never carry both ways."""
        possible = network.possible().toarray() > 0
        apart = np.argwhere(np.triu(self.among(task).matrix.weights.any(0) & ~(possible & possible.T)))
        if len(apart):
            one, other = (task.names[client] for client in apart[0])
            given = f"a link {one!r} – {other!r}, which {network.name} does not carry both ways"
            raise InvalidInput("ties.graph", given, "links that the network carries in both directions")

    def select(self, hyper: PyTree, by_example: tuple[bool, ...]) -> PyTree:
        """Return the tied leaves of hypers, with None in place of the others."""
        leaves, structure = jax.tree_util.tree_flatten_with_path(hyper)
        alone = by_example or (False,) * len(leaves)
        named = [self.entries is None or getattr(path[0], "key", None) in self.entries for path, _ in leaves]
        kept = [leaf if name and not own else None for (_, leaf), name, own in zip(leaves, named, alone, strict=True)]
        return structure.unflatten(kept)

    @property
    def matrix(self) -> Graph:
        """Graph whose rows and columns are the numbers of the parties."""
        if not isinstance(self.graph, Graph):
            raise InvalidInput("ties.graph", "links by name", "hp.networks.Graph(…), or a network= to run on")
        return self.graph

    def start(self, hyper: PyTree, problem: Problem) -> Neighbors:
        """Return a client's record of the others' hypers, before the first message."""
        n, tied = self.matrix.clients, self.select(hyper, problem.by_example)
        return Neighbors(jax.tree.map(lambda leaf: jnp.zeros((n, *leaf.shape), leaf.dtype), tied), jnp.zeros(n, bool))

    def exchange(self, problem: Problem) -> Node:
        """Return one round on states with `hyper` and `neighbors`: send the tied hypers and store the received ones."""

        def receive(state: Any, inbox: Inbox, ctx: Context) -> Any:
            heard, before = inbox.heard, state.neighbors
            assert heard is not None

            def remember(new: Array, old: Array) -> Array:
                return jnp.where(heard.reshape(-1, *[1] * (new.ndim - 1)), new, old)

            hypers = jax.tree.map(remember, inbox.total, before.hypers)
            return replace(state, neighbors=Neighbors(hypers, before.known | heard))

        def send(state: Any, ctx: Context) -> PyTree:
            return self.select(state.hyper, problem.by_example)

        return Exchange(send, receive, weights="ones", reduce="stack", observe=True)

    def add_pull(self, gradient: PyTree, state: Any, problem: Problem, ctx: Context) -> PyTree:
        """Return the gradient plus 2 Σ_v a_uv (λ_u − λ_v) of client u, over all v with a received message."""
        weights = 2 * self.strength * self.matrix.at(ctx.round)[0][ctx.client] * state.neighbors.known

        def pull(slope: Array, own: Array, others: Array | None) -> Array:
            if others is None:
                return slope
            return slope + jnp.tensordot(weights, own - others, axes=1).astype(slope.dtype)

        return jax.tree.map(pull, gradient, state.hyper, state.neighbors.hypers)
