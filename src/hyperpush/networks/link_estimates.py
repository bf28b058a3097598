"""What a client learns about its links while it trains."""

from dataclasses import replace

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


class LinkEstimates(eqx.Module):
    """What a client learns about the network while it trains: all that it can see from where it stands.

    Stacked over clients, every field has them on axis 0.

    Args:
        sent: p̄: the mean weight that it pushed to each client, its own at its own place.
        heard: δ̄: the share of the rounds in which it heard from each client.
        mass: The time average of its push-sum weight ω; 1 where weights are doubly stochastic.
        rounds: How many rounds it has seen.

    Example:
        >>> import hyperpush as hp
        >>> task, network = hp.tasks.quadratic(3, seed=0), hp.networks.FullyConnected(3)
        >>> seen = hp.train(task, hp.SGP(steps=10, step_size=0.1), network, key=0).links
        >>> print(seen.heard.shape, seen.rounds)
        (3, 3) [10. 10. 10.]
    """

    sent: Float[Array, "*clients n"]  # p̄: mean weight it sent to each client, its own at its own place
    heard: Float[Array, "*clients n"]  # δ̄: share of the rounds in which it heard from each client
    mass: Float[Array, "*clients"]  # time average of its push-sum weight ω
    rounds: Float[Array, "*clients"]  # how many rounds these are means of

    @staticmethod
    def none(clients: int, axis: tuple[int, ...] = ()) -> "LinkEstimates":
        """Nothing seen yet, of one client or of all along a leading axis."""
        nobody, number = jnp.zeros((*axis, clients)), jnp.zeros(axis)
        return LinkEstimates(nobody, nobody, number, number)

    def add(self, sent: Float[Array, " n"], heard: Bool[Array, " n"], mass: Float[Array, ""]) -> "LinkEstimates":
        """The means with one more round: what the client sent and heard, and its push-sum weight before it."""
        return self.join(LinkEstimates(sent, heard.astype(self.heard.dtype), mass, jnp.ones(())))

    def join(self, other: "LinkEstimates") -> "LinkEstimates":
        """The means over the rounds of both."""
        rounds = self.rounds + other.rounds
        share = other.rounds / jnp.maximum(rounds, 1)
        means = jax.tree.map(lambda a, b: a + share * (b - a), self, other)
        return replace(means, rounds=rounds)


def join_links(known: LinkEstimates | None, seen: LinkEstimates | None) -> LinkEstimates | None:
    """What is known of links after training: all that was seen so far, if an estimator asks for it (not None)."""
    return known if known is None or seen is None else known.join(seen)
