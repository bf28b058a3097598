"""Circulant networks: clients in a circle that send to fixed distances."""

from collections.abc import Sequence
from typing import ClassVar

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import scipy.sparse
from jaxtyping import PRNGKeyArray

from hyperpush.base.checks import check_integer
from hyperpush.networks.base import Network, Senders, Slots, Step
from hyperpush.networks.table import FixedGraph, adjacency


class Ring(FixedGraph):
    """A ring: i ↔ i + 1 (mod n), at every step.

    **Use it** as the sparsest undirected network without a hub. **Avoid it** with many clients: averages need about
    n² rounds, because 1 − |λ₂| of its weights is about (2π/n)²/3.

    Args:
        clients: n, at least 2.
        mixing: Gossip weights: `"metropolis"`, or `"fastest-mixing"` for up to 200 clients.

    Raises:
        InvalidInput: An option is out of range; the message names it.

    Example:
        >>> import jax
        >>> import hyperpush as hp
        >>> print(hp.networks.matrix(hp.networks.Ring(4), jax.random.key(0), 0, "ones"))
        [[1. 1. 0. 1.]
         [1. 1. 1. 0.]
         [0. 1. 1. 1.]
         [1. 0. 1. 1.]]
    """

    name: ClassVar[str] = "ring"

    def __init__(self, clients: int, mixing: str = "metropolis"):
        super().__init__("clients", _circulant(check_integer("clients", clients, minimum=2), (1, -1)), mixing)


class DirectedRing(FixedGraph):
    """A directed ring: i → i + 1 (mod n), at every step.

    **Use it** as the hardest connected case: one link per client, and n − 1 rounds until news has reached all
    clients. **Avoid it** for work: averages need about n² rounds.

    Args:
        clients: n, at least 2.

    Example:
        >>> import hyperpush as hp
        >>> print(hp.networks.DirectedRing(5).flood_rounds())
        4
    """

    name: ClassVar[str] = "directed-ring"
    directed = True

    def __init__(self, clients: int):
        super().__init__("clients", _circulant(check_integer("clients", clients, minimum=2), (1,)))


class Exponential(FixedGraph):
    """The static exponential graph: i → i + 2^k (mod n) for every 2^k < n, at every step.

    Assran et al., arXiv:1811.10792; Ying et al., arXiv:2110.13363. **Use it** where log₂ n messages per round are
    affordable: its spectral gap falls only like 1/log₂ n. **Avoid it** where each client can send one message:
    `OnePeerExponential` averages as fast.

    Args:
        clients: n, at least 2.

    Example:
        >>> import hyperpush as hp
        >>> print(hp.networks.Exponential(8).possible().sum(axis=1))
        [3 3 3 3 3 3 3 3]
    """

    name: ClassVar[str] = "exponential"
    directed = True

    def __init__(self, clients: int):
        clients = check_integer("clients", clients, minimum=2)
        super().__init__("clients", _circulant(clients, _powers(clients)))


class OnePeerExponential(Network):
    """The one-peer exponential graph: i → i + 2^(t mod ⌈log₂ n⌉) (mod n) at step t.

    Assran et al., arXiv:1811.10792. If n is a power of two, ⌈log₂ n⌉ steps average exactly (Ying et al.,
    arXiv:2110.13363). **Use it** where clients agree on the step and can reach each other: each client sends one
    message per step. **Avoid it** if steps may differ between clients, or if the links are given.

    Args:
        clients: n, from 2 to 2³⁰.

    Example:
        >>> import hyperpush as hp
        >>> print(hp.networks.OnePeerExponential(8).flood_rounds())
        3
    """

    name: ClassVar[str] = "one-peer-exponential"
    directed = True
    varying = True

    clients: int = eqx.field(static=True)

    def __init__(self, clients: int):
        self.clients = check_integer("clients", clients, minimum=2, maximum=2**30)

    def _slots(self, key: PRNGKeyArray, step: Step, senders: Senders) -> Slots:
        distance = jnp.asarray(_powers(self.clients))[jnp.asarray(step) % self.period()]
        return jnp.ones((senders.shape[0], 1), bool), ((senders + distance) % self.clients)[:, None]

    @property
    def scheduled(self) -> bool:
        return True

    def period(self) -> int:
        return len(_powers(self.clients))

    def flood_rounds(self) -> int:
        # Any ⌈log₂ n⌉ consecutive steps use each power of two once, and sums of these powers give every distance below
        # n. Fewer steps reach at most half as many distances, which is less than n.
        return self.period()

    def possible(self) -> scipy.sparse.csr_array:
        return _circulant(self.clients, _powers(self.clients))


def _powers(clients: int) -> np.ndarray:
    return 2 ** np.arange((clients - 1).bit_length(), dtype=np.int32)


def _circulant(clients: int, distances: Sequence[int] | np.ndarray) -> scipy.sparse.csr_array:
    senders = np.repeat(np.arange(clients), len(distances))
    return adjacency(clients, senders, (senders + np.tile(distances, clients)) % clients)
