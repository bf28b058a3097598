"""The interface of every network: a pure function from (key, step) to links and their weights."""

import abc
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, get_args

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse
from jaxtyping import Array, ArrayLike, Bool, Float, Int, PRNGKeyArray

from hyperpush.base.errors import InvalidInput, unknown
from hyperpush.networks.links import Links, dense_is_cheaper, densify
from hyperpush.networks.means import Means

Weights = Literal["push", "gossip", "ones"]
Mixing = Literal["push", "gossip"]
Step = Int[ArrayLike, ""]
Senders = Int[Array, " b"]
# Which slots of each sender hold a live link, and the receiver of each slot; None means that slot i leads to client i.
Slots = tuple[Bool[Array, "b k"], Int[Array, "b k"] | None]
Shares = tuple[Float[Array, "b k"], Float[Array, " b"]]  # weights of slots, and weights that senders keep


class Network(eqx.Module):
    """The base class of all networks: the links between clients at each step.

    The structure (existing links and their probabilities) is fixed when the network is built. The run's key decides
    which random links are up. The links of a sender depend on (key, step, sender) alone. So every client can compute
    its own links alone, and gets the same numbers as a simulation of all clients.

    **To write one**, derive from `hp.networks.Listed` if the links can be listed (`examples/extend/line.py` does).
    Else define `_slots`, `flood_rounds` and `possible`, and `means` if links are random. Every network has a
    `name`, and the fields `directed` and `varying` (True if links change). Links that change by a public schedule are
    `scheduled`, with their `period`.

    Example:
        >>> import hyperpush as hp
        >>> network = hp.networks.RandomDirected(5)
        >>> print(network.name, network.clients, network.directed, network.varying)
        random-directed 5 True True
    """

    example: ClassVar[Mapping[str, Any]] = {}  # values of options without default besides `clients`, for 6 clients

    name: ClassVar[str]
    clients: eqx.AbstractVar[int]
    directed: eqx.AbstractVar[bool]
    varying: eqx.AbstractVar[bool]

    @abc.abstractmethod
    def _slots(self, key: PRNGKeyArray, step: Step, senders: Senders) -> Slots:
        """Return which slots of the senders hold a live link, and each slot's receiver. All senders are clients."""

    def _gossip(self, key: PRNGKeyArray, step: Step, senders: Senders, slots: Slots) -> Shares:
        """Return symmetric doubly stochastic weights of live slots and of the sender itself; by default Metropolis.

        P[i, j] = 1 / (1 + max(deg_i, deg_j)) on the links of this step (Xiao and Boyd 2004). Weights are rounded down
        to a multiple of the float type's resolution below 1. Sums of such numbers up to 1 are exact in any order. So
        rows and columns sum to 1 without error, and a client computes the same own weight as a simulation.
        """
        everyone, _ = self._slots(key, step, jnp.arange(self.clients))
        degrees = jnp.sum(everyone, axis=1)
        alive, targets = slots
        theirs = degrees[None, :] if targets is None else degrees[targets]
        weights = round_down(1 / (1 + jnp.maximum(degrees[senders][:, None], theirs)).astype(jnp.result_type(float)))
        return weights, 1 - jnp.sum(jnp.where(alive, weights, 0), axis=1)

    @abc.abstractmethod
    def flood_rounds(self) -> int:
        """Return the number of rounds after which a maximum has reached all clients; computed on the host.

        The number is enough for every client that holds the maximum and every step at which the flood starts.
        """

    @abc.abstractmethod
    def possible(self) -> scipy.sparse.csr_array:
        """Return the links that can ever be up: entry [j, i] is True if j can send to i."""

    def two_way(self) -> bool:
        """Return True if j can ever send to i wherever i can ever send to j."""
        if not self.directed:
            return True
        possible = self.possible()
        return (possible != possible.T).nnz == 0

    def period(self) -> int:
        """Return the number of steps after which links repeat, for networks without random links."""
        return 1

    @property
    def scheduled(self) -> bool:
        """True if all links are known ahead: they repeat after `period()` steps for any key.

        On such networks exact averages along a tree follow a planned schedule. On other networks clients wait for
        links, because random links are not known ahead. False is always safe.
        """
        return not self.varying

    def means(self, weights: Mixing = "push") -> Means:
        """Return the exact frequency and mean weight of each link (n×n, on the host)."""
        everyone, key, n = jnp.arange(self.clients), jax.random.key(0), self.clients
        total, up = np.zeros((n, n)), np.zeros((n, n))
        for step in range(self.period()):
            links = densify(self.links(key, step, everyone, weights), n)
            total += np.asarray(links.weights, float) + np.diag(np.asarray(links.own, float))
            up += np.asarray(links.alive, float) + np.eye(n)
        return Means(total / self.period(), up / self.period())

    def check_weights(self, weights: str) -> None:
        """Raise InvalidInput for unknown weights and for gossip weights on directed links."""
        if weights not in get_args(Weights):
            raise unknown("weights", weights, get_args(Weights))
        if weights == "gossip" and self.directed:
            allowed = f"push on {self.name}: its links are directed, and gossip needs links that run both ways"
            raise InvalidInput("weights", weights, allowed)

    def frequencies(self) -> Float[np.ndarray, "n n"]:
        """Return the frequency of each link j → i (row j, column i); the diagonal has no meaning."""
        return self.means().up

    def uniform(self) -> float | None:
        """Return the frequency of links if all pairs of clients are linked equally often; return None otherwise."""
        return None

    def links(
        self, key: PRNGKeyArray, step: Step, senders: Senders, weights: Weights = "push", padded: bool = True
    ) -> Links:
        """Return the links of a block of senders at a step.

        Args:
            key: Key of random links; fixed networks ignore it.
            step: Time of the network, from 0.
            senders: Numbers of the sending clients. Numbers beyond the last client (padding of a block) send nothing
                and have self-weight 1.
            weights: `"push"`: P[i, j] = δ_{j→i} / Σ_k δ_{j→k}, the sender itself included: column stochastic. Shares
                are rounded down so that the sender's own weight is exact: rounding neither creates nor loses mass.
                `"gossip"`: symmetric and doubly stochastic, for undirected networks only. `"ones"`: 1 on every live
                link and for the sender itself.
            padded: False promises that no sender is beyond the last client.

        Raises:
            InvalidInput: The weights are unknown, or gossip weights are asked of a directed network.
        """
        self.check_weights(weights)
        real = senders < self.clients if padded else jnp.ones(senders.shape, bool)
        within = jnp.minimum(senders, self.clients - 1) if padded else senders
        alive, targets = self._slots(key, step, within)
        alive = alive & real[:, None] if padded else alive
        dtype = jnp.result_type(float)
        if weights == "push":
            receivers = jnp.sum(alive, axis=1).astype(dtype)
            share = jax.lax.optimization_barrier(round_down(1 / (1 + receivers)))  # else XLA divides once per link
            own = 1 - receivers * share
            shares = jnp.broadcast_to(share[:, None], alive.shape)
        elif weights == "gossip":
            shares, own = self._gossip(key, step, within, (alive, targets))
            own = jnp.where(real, own, 1).astype(dtype)
        else:
            own = jnp.ones(senders.shape, dtype)
            shares = jnp.ones(alive.shape, dtype)
        links = Links(own=own, weights=jnp.where(alive, shares, 0).astype(dtype), alive=alive, targets=targets)
        if targets is not None and self.varying and dense_is_cheaper(self.clients, targets.shape[1], prepared=False):
            return densify(links, self.clients)
        return links


def round_down(weights: Float[Array, "..."]) -> Float[Array, "..."]:
    """Round weights down to multiples of the spacing of floats just below 1.

    Sums of such multiples are exact in any order while they are at most 1.
    """
    grains = 1 / jnp.finfo(weights.dtype).epsneg
    return jnp.floor(weights * grains) / grains
