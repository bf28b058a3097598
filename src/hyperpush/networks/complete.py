"""The complete network: each client sends to all others."""

from typing import ClassVar

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import scipy.sparse
from jaxtyping import PRNGKeyArray

from hyperpush.base.checks import check_integer
from hyperpush.networks.base import Network, Senders, Slots, Step


class FullyConnected(Network):
    """All links at every step: P = 11ᵀ/n, so that one round averages exactly.

    **Use it** to see a method without the effects of a network: SGP becomes FedAvg. **Avoid it** where messages cost:
    every client sends n − 1 of them per round.

    Args:
        clients: n, at least 1.

    Example:
        >>> import jax
        >>> import hyperpush as hp
        >>> print(hp.networks.matrix(hp.networks.FullyConnected(2), jax.random.key(0), 0))
        [[0.5 0.5]
         [0.5 0.5]]
    """

    name: ClassVar[str] = "fully-connected"
    directed = False
    varying = False

    clients: int = eqx.field(static=True)

    def __init__(self, clients: int):
        self.clients = check_integer("clients", clients, minimum=1)

    def _slots(self, key: PRNGKeyArray, step: Step, senders: Senders) -> Slots:
        return senders[:, None] != jnp.arange(self.clients), None

    def flood_rounds(self) -> int:
        return min(1, self.clients - 1)

    def possible(self) -> scipy.sparse.csr_array:
        return all_pairs(self.clients)


def all_pairs(clients: int) -> scipy.sparse.csr_array:
    """Return the links from each client to all others."""
    return scipy.sparse.csr_array(~np.eye(clients, dtype=bool))
