"""Estimates of a client's links, made while it trains."""

from dataclasses import replace

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


class LinkEstimates(eqx.Module):
    """A client's estimates of the network while it trains, from its own observations.

    Stacked over clients, every field has them on axis 0.

    Args:
        sent: p̄: mean weight that it pushed to each client, its own at its own place.
        heard: δ̄: share of the rounds in which it heard from each client.
        mass: Time average of its push-sum weight ω; 1 where weights are doubly stochastic.
        rounds: Number of observed rounds.

    Example:
        >>> import hyperpush as hp
        >>> task, network = hp.tasks.quadratic(3, seed=0), hp.networks.FullyConnected(3)
        >>> seen = hp.train(task, hp.SGP(steps=10, step_size=0.1), network, key=0).links
        >>> print(seen.heard.shape, seen.rounds)
        (3, 3) [10. 10. 10.]
    """

    sent: Float[Array, "*clients n"]
    heard: Float[Array, "*clients n"]
    mass: Float[Array, "*clients"]
    rounds: Float[Array, "*clients"]

    @staticmethod
    def none(clients: int, axis: tuple[int, ...] = ()) -> "LinkEstimates":
        """Return empty estimates, of one client or of all along a leading axis."""
        vector, number = jnp.zeros((*axis, clients)), jnp.zeros(axis)
        return LinkEstimates(vector, vector, number, number)

    def add(self, sent: Float[Array, " n"], heard: Bool[Array, " n"], mass: Float[Array, ""]) -> "LinkEstimates":
        """Add one round: the weights sent, the clients heard, and the push-sum weight before the round."""
        return self.join(LinkEstimates(sent, heard.astype(self.heard.dtype), mass, jnp.ones(())))

    def join(self, other: "LinkEstimates") -> "LinkEstimates":
        """Return the means over the rounds of both."""
        rounds = self.rounds + other.rounds
        share = other.rounds / jnp.maximum(rounds, 1)
        means = jax.tree.map(lambda a, b: a + share * (b - a), self, other)
        return replace(means, rounds=rounds)


def join_links(known: LinkEstimates | None, seen: LinkEstimates | None) -> LinkEstimates | None:
    """Join estimates of links; None stays None if no estimator asks for them."""
    return known if known is None or seen is None else known.join(seen)
