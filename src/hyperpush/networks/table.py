"""Networks whose links are listed once: fixed graphs, and graphs that repeat after a number of steps."""

from collections.abc import Sequence

import equinox as eqx
import jax.numpy as jnp
import networkx as nx
import numpy as np
import scipy.sparse
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from hyperpush.base.errors import InvalidInput
from hyperpush.networks.base import Network, Senders, Shares, Slots, Step
from hyperpush.networks.links import dense_is_cheaper
from hyperpush.networks.reach import periodic_flood, require_connected
from hyperpush.networks.weights import doubly_stochastic

_LARGEST_TABLE = 2**26


class LinkTable(eqx.Module):
    """A table of the links of T steps, from which a `Listed` network reads its links.

    Args:
        field: Name of the option that an error reports if the links never connect all clients.
        frames: `frames[t]` has an entry [j, i] where j sends to i at step t; `hp.networks.adjacency` makes one.
        mixing: Gossip weights, `"metropolis"` or `"fastest-mixing"`. A table has gossip weights only if every step's
            links run both ways.

    Raises:
        InvalidInput: The links of all steps together are not strongly connected, or there are too many.

    Example:
        >>> import numpy as np
        >>> import hyperpush as hp
        >>> there = hp.networks.adjacency(3, np.array([0, 1, 2]), np.array([1, 2, 0]))
        >>> table = hp.networks.LinkTable("clients", [there])
        >>> print(table.gossip is None)  # links in one direction have no gossip weights
        True
    """

    alive: Bool[np.ndarray, "t n k"]  # True for live slots
    targets: Int[np.ndarray, "t n k"] | None  # receivers of slots; None: slot i leads to client i
    gossip: Float[np.ndarray, "t n k"] | None  # doubly stochastic weights of slots; None if directed
    own: Float[np.ndarray, "t n"] | None  # gossip weights that clients keep

    def __init__(self, field: str, frames: Sequence[scipy.sparse.csr_array], mixing: str = "metropolis"):
        clients = len(frames[0].indptr) - 1
        require_connected(field, _union(frames))
        slots = max(int(np.diff(frame.indptr).max()) for frame in frames)
        dense = dense_is_cheaper(clients, slots, prepared=True)
        shape = (len(frames), clients, clients if dense else slots)
        if np.prod(shape, dtype=float) > _LARGEST_TABLE:
            allowed = f"fewer: with up to {slots} links for one client the table of links grows too large"
            raise InvalidInput("clients", clients, allowed)
        undirected = all((frame != frame.T).nnz == 0 for frame in frames)
        self.alive = np.zeros(shape, bool)
        targets = np.tile(np.arange(clients, dtype=np.int32)[:, None], (len(frames), 1, shape[2]))
        gossip = np.zeros(shape)
        for step, frame in enumerate(frames):
            senders = np.repeat(np.arange(clients), np.diff(frame.indptr))
            at = step, senders, frame.indices if dense else np.arange(frame.nnz) - frame.indptr[senders]
            self.alive[at] = True
            targets[at] = frame.indices
            if undirected:
                gossip[at] = doubly_stochastic(frame, mixing)
        self.targets = None if dense else targets
        self.gossip, self.own = (gossip, 1 - gossip.sum(axis=2)) if undirected else (None, None)

    def rows(self, listed: Array | np.ndarray, step: Step, senders: Senders) -> Array:
        """Return the rows of a table for a block of senders, at the step modulo T."""
        # A fixed graph has one table for all steps.
        frame = jnp.asarray(listed[0]) if len(listed) == 1 else jnp.asarray(listed)[jnp.asarray(step) % len(listed)]
        return frame[senders]

    def slots(self, step: Step, senders: Senders) -> Slots:
        """Return which slots of the senders hold a live link at the step modulo T, and each slot's receiver."""
        targets = None if self.targets is None else self.rows(self.targets, step, senders)
        return self.rows(self.alive, step, senders), targets

    def frames(self) -> list[scipy.sparse.csr_array]:
        """Return the links of each step as a sparse matrix, in the form of the argument `frames`."""
        frames = []
        for step, alive in enumerate(self.alive):
            senders, slots = np.nonzero(alive)
            receivers = slots if self.targets is None else self.targets[step][senders, slots]
            frames.append(adjacency(alive.shape[0], senders, receivers))
        return frames


class Listed(Network):
    """A network that reads its links from a table: the base class of fixed and periodic networks.

    **To write one**, set `clients` and `table` in `__init__`, and `name` and `directed` in the class.
    `examples/extend/line.py` is one.

    Example:
        >>> import hyperpush as hp
        >>> print(isinstance(hp.networks.Ring(5), hp.networks.Listed))
        True
    """

    directed = False
    varying = False

    clients: int = eqx.field(static=True)
    table: LinkTable

    def _slots(self, key: PRNGKeyArray, step: Step, senders: Senders) -> Slots:
        return self.table.slots(step, senders)

    def _gossip(self, key: PRNGKeyArray, step: Step, senders: Senders, slots: Slots) -> Shares:
        assert self.table.gossip is not None  # the tables of undirected networks have weights
        assert self.table.own is not None
        return self.table.rows(self.table.gossip, step, senders), self.table.rows(self.table.own, step, senders)

    @property
    def scheduled(self) -> bool:
        return True

    def period(self) -> int:
        return len(self.table.alive)

    def flood_rounds(self) -> int:
        return periodic_flood(self.table.frames())

    def possible(self) -> scipy.sparse.csr_array:
        return _union(self.table.frames())


class FixedGraph(Listed):
    """A network with the same links at every step, from a networkx graph or a matrix; errors name `field`."""

    mixing: str = eqx.field(static=True)

    def __init__(self, field: str, graph: nx.Graph | scipy.sparse.csr_array, mixing: str = "metropolis"):
        links = _links_of(graph) if isinstance(graph, nx.Graph) else graph
        self.clients, self.mixing = len(links.indptr) - 1, mixing
        self.table = LinkTable(field, [links], mixing)


def adjacency(clients: int, senders: np.ndarray, receivers: np.ndarray) -> scipy.sparse.csr_array:
    """Return the matrix of the links senders[e] → receivers[e], each once, without self-loops.

    Args:
        clients: Number of rows and columns n.
        senders: Sender of each link, by number.
        receivers: Receiver of each link, by number.

    Example:
        >>> import numpy as np
        >>> import hyperpush as hp
        >>> print(hp.networks.adjacency(2, np.array([0, 0, 1]), np.array([1, 1, 1])).toarray())
        [[False  True]
         [False False]]
    """
    apart = senders != receivers
    ones = np.ones(int(apart.sum()), bool)
    return scipy.sparse.csr_array((ones, (senders[apart], receivers[apart])), shape=(clients, clients))


def _links_of(graph: nx.Graph) -> scipy.sparse.csr_array:
    numbers = {node: number for number, node in enumerate(graph)}
    ends = np.array([(numbers[sender], numbers[receiver]) for sender, receiver in graph.to_directed(True).edges()])
    return adjacency(len(numbers), *ends.reshape(-1, 2).T)


def _union(frames: Sequence[scipy.sparse.csr_array]) -> scipy.sparse.csr_array:
    return sum(frames[1:], start=frames[0])
