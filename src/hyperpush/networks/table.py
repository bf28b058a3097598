"""Networks whose links are listed once: fixed graphs, and graphs that repeat after a number of steps."""

from collections.abc import Sequence

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import scipy.sparse
from jaxtyping import Array, ArrayLike, Bool, Float, Int, PRNGKeyArray

from hyperpush.errors import InvalidInput
from hyperpush.networks.base import Network
from hyperpush.networks.links import dense_is_cheaper
from hyperpush.networks.reach import periodic_flood, require_connected

_LARGEST_TABLE = 2**26


class Table(eqx.Module):
    """The links of T steps: who is up, whom the slots lead to (None: slot i is client i), doubly stochastic weights."""

    alive: Bool[np.ndarray, "t n k"]
    targets: Int[np.ndarray, "t n k"] | None
    gossip: Float[np.ndarray, "t n k"] | None
    own: Float[np.ndarray, "t n"] | None

    def __init__(
        self,
        field: str,
        frames: Sequence[scipy.sparse.csr_array],
        gossip: Sequence[Float[np.ndarray, " e"]] | None = None,
    ):
        """`frames[t]` has an entry [j, i] where j sends to i, `gossip[t]` the weights of these entries.

        A network that is not strongly connected is refused in the name of `field`.
        """
        clients = len(frames[0].indptr) - 1
        require_connected(field, union(frames))
        slots = max(int(np.diff(frame.indptr).max()) for frame in frames)
        dense = dense_is_cheaper(clients, slots, prepared=True)
        shape = (len(frames), clients, clients if dense else slots)
        if np.prod(shape, dtype=float) > _LARGEST_TABLE:
            raise InvalidInput(
                "clients", clients, f"fewer: with up to {slots} links for one client the table of links grows too large"
            )
        self.alive = np.zeros(shape, bool)
        self.targets = None if dense else np.tile(np.arange(clients, dtype=np.int32)[:, None], (len(frames), 1, slots))
        self.gossip = None if gossip is None else np.zeros(shape)
        for step, frame in enumerate(frames):
            senders = np.repeat(np.arange(clients), np.diff(frame.indptr))
            position = frame.indices if dense else np.arange(frame.nnz) - frame.indptr[senders]
            self.alive[step, senders, position] = True
            if self.targets is not None:
                self.targets[step, senders, position] = frame.indices
            if self.gossip is not None and gossip is not None:
                self.gossip[step, senders, position] = gossip[step]
        self.own = None if self.gossip is None else 1 - self.gossip.sum(axis=2)

    def rows(self, listed: Array | np.ndarray, step: Int[ArrayLike, ""], senders: Int[Array, " b"]) -> Array:
        """The rows of a block of senders at step modulo T."""
        # A fixed graph needs no look-up by step.
        frame = jnp.asarray(listed[0]) if len(listed) == 1 else jnp.asarray(listed)[jnp.asarray(step) % len(listed)]
        return frame[senders]

    def slots(
        self, step: Int[ArrayLike, ""], senders: Int[Array, " b"]
    ) -> tuple[Bool[Array, "b k"], Int[Array, "b k"] | None]:
        """Which slots are up at step modulo T, and whom they lead to."""
        targets = None if self.targets is None else self.rows(self.targets, step, senders)
        return self.rows(self.alive, step, senders), targets

    def frames(self) -> list[scipy.sparse.csr_array]:
        """The links of each step as a matrix, as the table was built from."""
        frames = []
        for step, alive in enumerate(self.alive):
            senders, slots = np.nonzero(alive)
            receivers = slots if self.targets is None else self.targets[step][senders, slots]
            frames.append(adjacency(alive.shape[0], senders, receivers))
        return frames


class Listed(Network):
    """A network that reads its links from a table."""

    table: eqx.AbstractVar[Table]

    def _slots(
        self, key: PRNGKeyArray, step: Int[ArrayLike, ""], senders: Int[Array, " b"]
    ) -> tuple[Bool[Array, "b k"], Int[Array, "b k"] | None]:
        return self.table.slots(step, senders)

    def _gossip(
        self,
        key: PRNGKeyArray,
        step: Int[ArrayLike, ""],
        senders: Int[Array, " b"],
        alive: Bool[Array, "b k"],
        targets: Int[Array, "b k"] | None,
    ) -> tuple[Float[Array, "b k"], Float[Array, " b"]]:
        assert self.table.gossip is not None  # undirected networks build their table with weights
        assert self.table.own is not None
        return self.table.rows(self.table.gossip, step, senders), self.table.rows(self.table.own, step, senders)

    def period(self) -> int:
        return len(self.table.alive)

    def flood_rounds(self) -> int:
        return periodic_flood(self.table.frames())

    def possible(self) -> scipy.sparse.csr_array:
        return union(self.table.frames())


def union(frames: Sequence[scipy.sparse.csr_array]) -> scipy.sparse.csr_array:
    """The links that are up in any of the frames."""
    return sum(frames[1:], start=frames[0])


def adjacency(clients: int, senders: np.ndarray, receivers: np.ndarray) -> scipy.sparse.csr_array:
    """The matrix of the links senders[e] → receivers[e], each once, without those from a client to itself."""
    apart = senders != receivers
    graph = scipy.sparse.csr_array(
        (np.ones(int(apart.sum()), bool), (senders[apart], receivers[apart])), shape=(clients, clients)
    )
    graph.sum_duplicates()
    return graph
