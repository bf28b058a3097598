"""Links that come and go independently of one another."""

from collections.abc import Sequence
from typing import ClassVar

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import scipy.sparse
from jaxtyping import Array, ArrayLike, Bool, Float, Int, PRNGKeyArray, UInt32

from hyperpush.checks import check_integer, check_probability_range
from hyperpush.networks.base import Network
from hyperpush.networks.hashing import words
from hyperpush.networks.means import Means, of_independent
from hyperpush.networks.reach import random_flood, require_connected

Probability = float | Sequence[float]

_UNIT = 2**24
_MOST = 2**16 - 1  # so that the index of every link fits a 32-bit word


class _Independent(Network):
    """Each link is up at each step with its own probability, drawn once from its seed if a range is given.

    A link is up when the first 24 bits of its random word, as a fraction u of 2^24, are below its probability. The
    comparison is one of whole numbers, so it gives the same answer in every float precision.
    """

    thresholds: eqx.AbstractVar[UInt32[np.ndarray, "..."]]

    def probabilities(self) -> Float[np.ndarray, "n n"]:
        """How often each link j → i (row j, column i) is up; 0 from a client to itself."""
        everyone = np.broadcast_to(self.thresholds / _UNIT, (self.clients, self.clients))
        return np.where(np.eye(self.clients, dtype=bool), 0, everyone)

    def _slots(
        self, key: PRNGKeyArray, step: Int[ArrayLike, ""], senders: Int[Array, " b"]
    ) -> tuple[Bool[Array, "b k"], None]:
        sender, receiver = senders.astype(jnp.uint32)[:, None], jnp.arange(self.clients, dtype=jnp.uint32)
        if self.directed:
            index = sender * self.clients + receiver
        else:
            index = jnp.minimum(sender, receiver) * self.clients + jnp.maximum(sender, receiver)
        thresholds = jnp.asarray(self.thresholds)
        below = (words(key, step, index) >> 8) < (thresholds[senders] if thresholds.ndim else thresholds)
        return below & (sender != receiver), None

    def means(self) -> Means:
        return of_independent(self.probabilities())

    def flood_rounds(self) -> int:
        silent = 1 - self.probabilities()
        return random_flood(self, stall=float(max(silent.prod(axis=0).max(), silent.prod(axis=1).max())))

    def possible(self) -> scipy.sparse.csr_array:
        return scipy.sparse.csr_array(self.probabilities() > 0)


class RandomDirected(_Independent):
    """Each direction of each link is up independently at each step, with its own probability."""

    name: ClassVar[str] = "random-directed"
    directed: ClassVar[bool] = True
    varying: ClassVar[bool] = True

    clients: int = eqx.field(static=True)
    probability: tuple[float, float] = eqx.field(static=True)
    seed: int = eqx.field(static=True)
    thresholds: UInt32[np.ndarray, "..."]

    def __init__(self, clients: int, probability: Probability = (0.4, 0.8), seed: int = 0):
        self.clients = check_integer("clients", clients, minimum=2, maximum=_MOST)
        self.probability = check_probability_range("probability", probability)
        self.seed = check_integer("seed", seed, minimum=0)
        self.thresholds = _thresholds(_drawn(self.clients, self.probability, self.seed))
        _require_connected(self)


class RandomUndirected(_Independent):
    """Each link is up, both ways at once, independently at each step with its own probability.

    Gossip weights are Metropolis weights of the links of the step.
    """

    name: ClassVar[str] = "random-undirected"
    directed: ClassVar[bool] = False
    varying: ClassVar[bool] = True

    clients: int = eqx.field(static=True)
    probability: tuple[float, float] = eqx.field(static=True)
    seed: int = eqx.field(static=True)
    thresholds: UInt32[np.ndarray, "..."]

    def __init__(self, clients: int, probability: Probability = (0.4, 0.8), seed: int = 0):
        self.clients = check_integer("clients", clients, minimum=2, maximum=_MOST)
        self.probability = check_probability_range("probability", probability)
        self.seed = check_integer("seed", seed, minimum=0)
        drawn = _drawn(self.clients, self.probability, self.seed)
        self.thresholds = _thresholds(np.triu(drawn) + np.triu(drawn, 1).T if drawn.ndim else drawn)
        _require_connected(self)


def _drawn(clients: int, probability: tuple[float, float], seed: int) -> Float[np.ndarray, "..."]:
    """The probability of every link, or a single one if all are equal: no table is needed then."""
    low, high = probability
    return np.random.default_rng(seed).uniform(low, high, () if low == high else (clients, clients))


def _thresholds(probabilities: Float[np.ndarray, "..."]) -> UInt32[np.ndarray, "..."]:
    return np.asarray(np.rint(probabilities * _UNIT), np.uint32)


def _require_connected(network: _Independent) -> None:
    if not network.thresholds.all():  # otherwise every link can be up, and no search is needed
        require_connected("probability", network.possible())
