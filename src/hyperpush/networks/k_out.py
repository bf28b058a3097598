"""Each client sends to k random others: few links for many clients."""

import functools
from collections.abc import Mapping
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse
from jaxtyping import Array, Int, PRNGKeyArray, UInt32

from hyperpush.base.checks import check_boolean, check_integer
from hyperpush.base.errors import InvalidInput
from hyperpush.networks.base import Mixing, Network, Senders, Slots, Step
from hyperpush.networks.complete import all_pairs
from hyperpush.networks.hashing import words
from hyperpush.networks.means import Means
from hyperpush.networks.reach import is_connected, periodic_flood, random_flood
from hyperpush.networks.table import LinkTable, adjacency

_DRAWS = 100


class KOut(Network):
    """Each client sends to k others, drawn uniformly: in every step, or once for all steps.

    Time and memory are O(n·k) per step. **Use it** for many clients: 100,000 are feasible. **Avoid it** with
    `varying=False` and small k: a fixed draw is strongly connected only if k is of the order of ln n. Receivers that
    are redrawn in every step connect all clients over time for every k.

    Args:
        clients: n, at least 2.
        k: Links per client, from 1 to n − 1.
        varying: True draws the receivers in every step, False once.
        seed: Seed of a fixed draw, 0 or more. With `varying=True` the run's key decides the draws.

    Raises:
        InvalidInput: An option is out of range, or none of 100 fixed draws was strongly connected.

    Example:
        >>> import hyperpush as hp
        >>> print(hp.networks.KOut(5, k=2).means().up[0])
        [1.  0.5 0.5 0.5 0.5]
    """

    example: ClassVar[Mapping[str, Any]] = {"k": 2}
    name: ClassVar[str] = "k-out"
    directed = True

    clients: int = eqx.field(static=True)
    k: int = eqx.field(static=True)
    varying: bool = eqx.field(static=True)
    seed: int = eqx.field(static=True)
    table: LinkTable | None

    def __init__(self, clients: int, k: int, varying: bool = True, seed: int = 0):
        self.clients = check_integer("clients", clients, minimum=2)
        self.k = check_integer("k", k, minimum=1, maximum=min(clients - 1, (2**32 - 1) // clients))
        self.varying = check_boolean("varying", varying)
        self.seed = check_integer("seed", seed, minimum=0)
        self.table = None if varying else LinkTable("k", [_draw_connected(self.clients, self.k, self.seed)])

    def _slots(self, key: PRNGKeyArray, step: Step, senders: Senders) -> Slots:
        if self.table is not None:
            return self.table.slots(step, senders)
        targets = _picks(key, step, senders, self.clients, self.k)
        return jnp.ones(targets.shape, bool), targets

    def two_way(self) -> bool:
        return self.table is None or super().two_way()

    def means(self, weights: Mixing = "push") -> Means:
        if self.table is not None:
            return super().means(weights)
        self.check_weights(weights)
        itself = np.eye(self.clients, dtype=bool)
        up = np.where(itself, 1, self.k / (self.clients - 1))
        return Means(up / (self.k + 1), up)

    def uniform(self) -> float | None:
        return self.k / (self.clients - 1) if self.table is None else None

    def flood_rounds(self) -> int:
        if self.table is not None:
            return periodic_flood(self.table.frames())
        # Each informed client reaches k others; only the last clients can be missed by all independent picks.
        return random_flood(self, stall=(1 - self.k / (self.clients - 1)) ** (self.clients - 1))

    def possible(self) -> scipy.sparse.csr_array:
        """Return the links that can ever be up: those between all clients if receivers are redrawn in every step."""
        return all_pairs(self.clients) if self.table is None else self.table.frames()[0]


@functools.partial(jax.jit, inline=True, static_argnames=("clients", "k"))
def _picks(key: PRNGKeyArray, step: Step, senders: Senders, clients: int, k: int) -> Int[Array, "b k"]:
    """Draw k distinct receivers of each sender, uniform over sets of k (Floyd's sampling: Bentley and Floyd 1987).

    Draw r takes a random client among the first m = n − k + r others, or the m-th if that client is already drawn.
    """
    index = senders.astype(jnp.uint32) * k + jnp.arange(k, dtype=jnp.uint32)[:, None]
    bits = words(key, step, index)

    def pick(r: Int[Array, ""], picks: UInt32[Array, "k b"]) -> UInt32[Array, "k b"]:
        last = (clients - 1 - k + r).astype(jnp.uint32)
        # The remainder favors small numbers by less than n / 2^32.
        one = bits[r] % (last + 1)
        return picks.at[r].set(jnp.where((picks == one).any(axis=0), last, one))

    # A loop, because k unrolled picks are hardly faster and take half a minute to compile at k = 50.
    others = jax.lax.fori_loop(0, k, pick, jnp.full(bits.shape, clients, jnp.uint32))
    return (senders[:, None] + 1 + others.T.astype(senders.dtype)) % clients


def _draw_connected(clients: int, k: int, seed: int) -> scipy.sparse.csr_array:
    senders = np.repeat(np.arange(clients), k)
    for attempt in range(_DRAWS):
        receivers = np.asarray(_picks(jax.random.key(seed), attempt, jnp.arange(clients), clients, k)).ravel()
        # Most unconnected draws have a client that nobody picked, which is cheaper to check than connectivity.
        if np.bincount(receivers, minlength=clients).all():
            graph = adjacency(clients, senders, receivers)
            if is_connected(graph):
                return graph
    allowed = f"larger for {clients} clients, or varying picks: none of {_DRAWS} draws was strongly connected"
    raise InvalidInput("k", k, allowed)
