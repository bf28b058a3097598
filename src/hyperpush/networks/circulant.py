"""Clients in a circle that send to those at fixed distances."""

from collections.abc import Sequence
from typing import ClassVar

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import scipy.sparse
from jaxtyping import Array, ArrayLike, Bool, Int, PRNGKeyArray

from hyperpush.checks import check_integer
from hyperpush.networks.base import Network
from hyperpush.networks.table import Listed, Table, adjacency
from hyperpush.networks.weights import doubly_stochastic


class Ring(Listed):
    """i ↔ i + 1 (mod n). `mixing` chooses the gossip weights: "metropolis" or "fastest-mixing"."""

    name: ClassVar[str] = "ring"
    directed: ClassVar[bool] = False
    varying: ClassVar[bool] = False

    clients: int = eqx.field(static=True)
    mixing: str = eqx.field(static=True)
    table: Table

    def __init__(self, clients: int, mixing: str = "metropolis"):
        self.clients = check_integer("clients", clients, minimum=2)
        self.mixing = mixing
        graph = _circulant(clients, (1, -1))
        self.table = Table("clients", [graph], [doubly_stochastic(graph, mixing)])


class DirectedRing(Listed):
    """i → i + 1 (mod n)."""

    name: ClassVar[str] = "directed-ring"
    directed: ClassVar[bool] = True
    varying: ClassVar[bool] = False

    clients: int = eqx.field(static=True)
    table: Table

    def __init__(self, clients: int):
        self.clients = check_integer("clients", clients, minimum=2)
        self.table = Table("clients", [_circulant(clients, (1,))])


class Exponential(Listed):
    """i → i + 2^k (mod n) for every 2^k < n, at every step (Assran et al. 2019; Ying et al. 2021)."""

    name: ClassVar[str] = "exponential"
    directed: ClassVar[bool] = True
    varying: ClassVar[bool] = False

    clients: int = eqx.field(static=True)
    table: Table

    def __init__(self, clients: int):
        self.clients = check_integer("clients", clients, minimum=2)
        self.table = Table("clients", [_circulant(clients, _powers(clients))])


class OnePeerExponential(Network):
    """i → i + 2^(t mod ⌈log₂ n⌉) (mod n) at step t: one message per client and step (Assran et al. 2019).

    When n is a power of two, ⌈log₂ n⌉ steps average exactly (Ying et al. 2021).
    """

    name: ClassVar[str] = "one-peer-exponential"
    directed: ClassVar[bool] = True
    varying: ClassVar[bool] = True

    clients: int = eqx.field(static=True)

    def __init__(self, clients: int):
        self.clients = check_integer("clients", clients, minimum=2, maximum=2**30)

    def _slots(
        self, key: PRNGKeyArray, step: Int[ArrayLike, ""], senders: Int[Array, " b"]
    ) -> tuple[Bool[Array, "b 1"], Int[Array, "b 1"]]:
        distance = jnp.asarray(_powers(self.clients))[jnp.asarray(step) % len(_powers(self.clients))]
        targets = (senders + distance) % self.clients
        return jnp.ones((senders.shape[0], 1), bool), targets[:, None]

    def period(self) -> int:
        return len(_powers(self.clients))

    def flood_rounds(self) -> int:
        # Any ⌈log₂ n⌉ steps in a row use each power once, and their sums give every distance below n; fewer steps reach
        # at most half as many distances, which is less than n.
        return len(_powers(self.clients))

    def possible(self) -> scipy.sparse.csr_array:
        return _circulant(self.clients, _powers(self.clients))


def _powers(clients: int) -> np.ndarray:
    return 2 ** np.arange((clients - 1).bit_length(), dtype=np.int32)


def _circulant(clients: int, distances: Sequence[int] | np.ndarray) -> scipy.sparse.csr_array:
    senders = np.repeat(np.arange(clients), len(distances))
    return adjacency(clients, senders, (senders + np.tile(distances, clients)) % clients)
