"""The links of a block of senders in one step, laid out by client (dense) or by slot (sparse)."""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


class Links(eqx.Module):
    """The links of a block of b senders in one step, as `network.links` returns them.

    The dense layout has one slot per client. The sparse layout has k slots per sender, with receivers in `targets`.

    Args:
        own: Weight that each sender keeps for itself.
        weights: Weight of each slot; 0 where the link is down.
        alive: True where the link is up.
        targets: Receiver of each slot; None if slot i leads to client i.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import hyperpush as hp
        >>> links = hp.networks.Ring(30).links(jax.random.key(0), 0, jnp.arange(2))
        >>> print(links.targets)  # receivers of clients 0 and 1
        [[ 1 29]
         [ 0  2]]
    """

    own: Float[Array, " b"]
    weights: Float[Array, "b k"]
    alive: Bool[Array, "b k"]
    targets: Int[Array, "b k"] | None


def dense_is_cheaper(clients: int, slots: int, prepared: bool) -> bool:
    """Return True if mixing by a matrix product costs less than mixing by edges.

    Measured on 2 CPU cores with n = 3..2000 clients, k = 1..50 slots and messages of d = 6..1000 numbers. A product
    takes n·n·d fast operations and edges take n·k·d slow ones. Both cost the same between k = n/10 and k = n/8, for
    every d. Links that change in each step must first be written into a matrix by n·n·k comparisons. Then a product
    is cheaper only for k ≥ n/2. `prepared` is True if the matrix already exists.
    """
    return slots * (8 if prepared else 2) >= clients


def densify(links: Links, clients: int) -> Links:
    """Return the same links and weights in the dense layout, with one slot per client."""
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
