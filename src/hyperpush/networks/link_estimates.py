"""Estimates of the weights and frequencies of a client's links, made while the client trains."""

from dataclasses import replace

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


class LinkEstimates(eqx.Module):
    """A client's estimates of its links' weights and frequencies, which it observes while it trains.

    The estimates of several clients are stacked along axis 0 of every field.

    Args:
        sent: p̄: mean weight with which the client pushed to each client; its own entry is the weight that it kept.
        heard: δ̄: share of the rounds in which the client received a message from each client.
        mass: Time average of the client's push-sum weight ω; 1 with doubly stochastic weights.
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
        """Return empty estimates of one client, or of several clients along the leading `axis`."""
        vector, number = jnp.zeros((*axis, clients)), jnp.zeros(axis)
        return LinkEstimates(vector, vector, number, number)

    def add(self, sent: Float[Array, " n"], heard: Bool[Array, " n"], mass: Float[Array, ""]) -> "LinkEstimates":
        """Add one round: the weights sent, the clients heard, and the push-sum weight before the round."""
        return self.join(LinkEstimates(sent, heard.astype(self.heard.dtype), mass, jnp.ones(())))

    def join(self, other: "LinkEstimates") -> "LinkEstimates":
        """Return the means over the rounds of these and of the other estimates."""
        rounds = self.rounds + other.rounds
        share = other.rounds / jnp.maximum(rounds, 1)
        means = jax.tree.map(lambda a, b: a + share * (b - a), self, other)
        return replace(means, rounds=rounds)


def join_links(known: LinkEstimates | None, seen: LinkEstimates | None) -> LinkEstimates | None:
    """Return the known link estimates joined with new ones; None if no estimator needs them."""
    return known if known is None or seen is None else known.join(seen)
