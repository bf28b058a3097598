"""Links that come and go independently of one another."""

from collections.abc import Sequence
from typing import ClassVar

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import scipy.sparse
from jaxtyping import Float, PRNGKeyArray, UInt32

from hyperpush.base.checks import check_integer, check_probability_range
from hyperpush.networks.base import Mixing, Network, Senders, Slots, Step
from hyperpush.networks.hashing import words
from hyperpush.networks.means import Means, gossip_of_independent, of_independent
from hyperpush.networks.reach import random_flood, require_connected

_UNIT = 2**24
_MOST = 2**16 - 1  # so that the index of every link fits a 32-bit word


class _Independent(Network):
    """Each link is up at each step with its own probability, drawn once from the seed if a range is given.

    A link is up if the first 24 bits of its random word, divided by 2^24, are below its probability. The comparison
    uses whole numbers, so its result is the same in every float precision.
    """

    varying = True

    clients: int = eqx.field(static=True)
    probability: tuple[float, float] = eqx.field(static=True)
    seed: int = eqx.field(static=True)
    thresholds: UInt32[np.ndarray, "..."]  # probability · 2^24 of each link; a scalar if all are equal

    def __init__(self, clients: int, probability: float | Sequence[float], seed: int):
        self.clients = check_integer("clients", clients, minimum=2, maximum=_MOST)
        self.probability = low, high = check_probability_range("probability", probability)
        self.seed = check_integer("seed", seed, minimum=0)
        drawn = np.random.default_rng(seed).uniform(low, high, () if low == high else (self.clients, self.clients))
        if drawn.ndim and not self.directed:
            drawn = np.triu(drawn) + np.triu(drawn, 1).T
        self.thresholds = np.asarray(np.rint(drawn * _UNIT), np.uint32)
        if not self.thresholds.all():  # else all links can be up, and the search is skipped
            require_connected("probability", self.possible())

    def probabilities(self) -> Float[np.ndarray, "n n"]:
        """Return the probability of each link j → i (row j, column i); 0 on the diagonal."""
        everyone = np.broadcast_to(self.thresholds / _UNIT, (self.clients, self.clients))
        return np.where(np.eye(self.clients, dtype=bool), 0, everyone)

    def _slots(self, key: PRNGKeyArray, step: Step, senders: Senders) -> Slots:
        sender, receiver = senders.astype(jnp.uint32)[:, None], jnp.arange(self.clients, dtype=jnp.uint32)
        if self.directed:
            index = sender * self.clients + receiver
        else:
            index = jnp.minimum(sender, receiver) * self.clients + jnp.maximum(sender, receiver)
        thresholds = jnp.asarray(self.thresholds)
        below = (words(key, step, index) >> 8) < (thresholds[senders] if thresholds.ndim else thresholds)
        return below & (sender != receiver), None

    def means(self, weights: Mixing = "push") -> Means:
        self.check_weights(weights)
        return (gossip_of_independent if weights == "gossip" else of_independent)(self.probabilities())

    def frequencies(self) -> Float[np.ndarray, "n n"]:
        return self.probabilities()  # `means` would take n times as long

    def flood_rounds(self) -> int:
        silent = 1 - self.probabilities()
        return random_flood(self, stall=float(max(silent.prod(axis=0).max(), silent.prod(axis=1).max())))

    def possible(self) -> scipy.sparse.csr_array:
        return scipy.sparse.csr_array(self.probabilities() > 0)


class RandomDirected(_Independent):
    """Each direction of each link is up at each step with its own probability, independently of all others.

    **Use it** as a model of directed links that come and go (Terashita and Hara, arXiv:2210.02129, use ranges like the
    default). **Avoid it** for many clients with few links: n² numbers are drawn per step; see `KOut`.

    Args:
        clients: n, from 2 to 65,535.
        probability: One number from 0 to 1 for all links, or a range (low, high). Each link draws its probability from
            the range once. 0 is refused, because no link is ever up; 1 is a fixed network.
        seed: Seed of the links' probabilities, 0 or more. The run's key decides which links are up.

    Raises:
        InvalidInput: An option is out of range, or some clients can never be reached.

    Example:
        >>> import hyperpush as hp
        >>> network = hp.networks.RandomDirected(3, probability=0.5)
        >>> print(network.means().up)
        [[1.  0.5 0.5]
         [0.5 1.  0.5]
         [0.5 0.5 1. ]]
    """

    name: ClassVar[str] = "random-directed"
    directed = True

    def __init__(self, clients: int, probability: float | Sequence[float] = (0.4, 0.8), seed: int = 0):
        super().__init__(clients, probability, seed)


class RandomUndirected(_Independent):
    """Each link is up at each step, both ways at once, with its own probability.

    Gossip weights are the Metropolis weights of the current step's links. **Use it** as a model of undirected links
    that come and go, also for methods that need an undirected network. **Avoid it** for many clients with few links:
    n² numbers are drawn per step.

    Args:
        clients: n, from 2 to 65,535.
        probability: As in `RandomDirected`.
        seed: As in `RandomDirected`.

    Raises:
        InvalidInput: An option is out of range, or some clients can never be reached.

    Example:
        >>> import jax
        >>> import hyperpush as hp
        >>> weights = hp.networks.matrix(hp.networks.RandomUndirected(4), jax.random.key(0), 0, "gossip")
        >>> print((weights == weights.T).all(), weights.sum(axis=0))
        True [1. 1. 1. 1.]
    """

    name: ClassVar[str] = "random-undirected"
    directed = False

    def __init__(self, clients: int, probability: float | Sequence[float] = (0.4, 0.8), seed: int = 0):
        super().__init__(clients, probability, seed)
