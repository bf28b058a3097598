"""What a block of senders sends on in one step, and how it is laid out: by client (dense) or by slot (sparse)."""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


class Links(eqx.Module):
    """The links on which a block of b senders sends in one step, as `network.links` gives them.

    They are dense, one slot per client, or sparse, with k slots that say whom they lead to.

    Args:
        own: The weight that each sender keeps for itself.
        weights: Of each slot; 0 where the link is down.
        alive: Whether the link is up.
        targets: The receiver of each slot; None if slot i leads to client i.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import hyperpush as hp
        >>> links = hp.networks.Ring(30).links(jax.random.key(0), 0, jnp.arange(2))
        >>> print(links.targets)  # whom clients 0 and 1 send to
        [[ 1 29]
         [ 0  2]]
    """

    own: Float[Array, " b"]  # the weight that each sender keeps for itself
    weights: Float[Array, "b k"]  # of each slot; 0 where the link is down
    alive: Bool[Array, "b k"]  # whether the link is up
    targets: Int[Array, "b k"] | None  # the receiver of each slot; None: slot i leads to client i


def dense_is_cheaper(clients: int, slots: int, prepared: bool) -> bool:
    """Whether mixing by a matrix product costs less than mixing by edges.

    Measured on 2 CPU cores, n = 3..2000, k = 1..50, d = 6..1000. A product costs n·n·d fast operations, edges n·k·d
    slow ones: they break even between k = n/10 and k = n/8 for every d. Links that change at each step must first be
    spread into a matrix, n·n·k comparisons, and then only k ≥ n/2 pays.
    """
    return slots * (8 if prepared else 2) >= clients


def densify(links: Links, clients: int) -> Links:
    """The same links with one slot per client: every number is moved, none is changed."""
    if links.targets is None:
        return links
    everyone = jnp.arange(clients)
    weights = jnp.zeros((links.own.shape[0], clients), links.weights.dtype)
    alive = jnp.zeros(weights.shape, bool)
    # One comparison per slot keeps memory at b·n; padding slots are never alive, so they cannot hide a live one.
    for slot in range(links.targets.shape[1]):
        hit = links.alive[:, slot, None] & (links.targets[:, slot, None] == everyone)
        weights = jnp.where(hit, links.weights[:, slot, None], weights)
        alive = alive | hit
    return Links(own=links.own, weights=weights, alive=alive, targets=None)
