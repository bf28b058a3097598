"""Everybody sends to everybody."""

from typing import ClassVar

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import scipy.sparse
from jaxtyping import Array, ArrayLike, Bool, Float, Int, PRNGKeyArray

from hyperpush.checks import check_integer
from hyperpush.networks.base import Network
from hyperpush.networks.table import adjacency


class FullyConnected(Network):
    """All links at every step: P = 11ᵀ/n, with which SGP becomes FedAvg."""

    name: ClassVar[str] = "fully-connected"
    directed: ClassVar[bool] = False
    varying: ClassVar[bool] = False

    clients: int = eqx.field(static=True)

    def __init__(self, clients: int):
        self.clients = check_integer("clients", clients, minimum=1)

    def _slots(
        self, key: PRNGKeyArray, step: Int[ArrayLike, ""], senders: Int[Array, " b"]
    ) -> tuple[Bool[Array, "b k"], None]:
        return senders[:, None] != jnp.arange(self.clients), None

    def _gossip(
        self,
        key: PRNGKeyArray,
        step: Int[ArrayLike, ""],
        senders: Int[Array, " b"],
        alive: Bool[Array, "b k"],
        targets: Int[Array, "b k"] | None,
    ) -> tuple[Float[Array, "b k"], Float[Array, " b"]]:
        return jnp.full(alive.shape, 1 / self.clients), jnp.full(senders.shape, 1 / self.clients)

    def flood_rounds(self) -> int:
        return min(1, self.clients - 1)

    def possible(self) -> scipy.sparse.csr_array:
        return everyone(self.clients)


def everyone(clients: int) -> scipy.sparse.csr_array:
    """The links from all to all."""
    senders, receivers = np.divmod(np.arange(clients * clients), clients)
    return adjacency(clients, senders, receivers)
