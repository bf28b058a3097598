"""Combine the messages of a block of senders, and build the mixing matrix of a step."""

from collections.abc import Callable
from typing import Literal, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Int, PRNGKeyArray

from hyperpush.base.errors import unknown
from hyperpush.networks.base import Network, Weights
from hyperpush.networks.links import Links, densify

Values = TypeVar("Values")

# Up to these sizes a product with a matrix of links is faster as one fused loop than as a library call.
NARROW = 16
SMALL = 1 << 18


def combine(links: Links, values: Values, clients: int, reduce: Literal["sum", "max"] = "sum") -> Values:
    """Return the combined messages of a block of senders at each of n clients, without the clients' own shares.

    Args:
        links: The links of b senders.
        values: Messages, a pytree with leaves [b, ...].
        clients: Number of clients n.
        reduce: `"sum"`: out_i = Σ_j P[i, j] v_j. `"max"`: the largest v_j among the live links j → i, and the lowest
            value of the type (-inf) without any.

    Returns:
        A pytree with leaves [n, ...].

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import hyperpush as hp
        >>> links = hp.networks.DirectedRing(3).links(jax.random.key(0), 0, jnp.arange(3))
        >>> print(hp.networks.combine(links, jnp.array([2.0, 4.0, 6.0]), 3))
        [3. 1. 2.]
    """
    if reduce not in ("sum", "max"):
        raise unknown("reduce", reduce, ("sum", "max"))
    combined = _sum if reduce == "sum" else _max
    leaves, structure = jax.tree.flatten(jax.tree.map(jnp.asarray, values))
    widths = [leaf[0].size for leaf in leaves]
    if len({leaf.dtype for leaf in leaves}) == 1 and sum(widths) <= NARROW:
        # The parts of a short message are joined, because a loop over the links for each part costs more.
        joined = jnp.concatenate([leaf.reshape(leaf.shape[0], -1) for leaf in leaves], axis=1)
        parts = jnp.split(combined(links, joined, clients), np.cumsum(widths)[:-1], axis=1)
        received = [part.reshape(clients, *leaf.shape[1:]) for part, leaf in zip(parts, leaves, strict=True)]
    else:
        received = [combined(links, leaf, clients) for leaf in leaves]
    return jax.tree.unflatten(structure, received)


def matrix(
    network: Network, key: PRNGKeyArray, step: Int[ArrayLike, ""], weights: Weights = "push"
) -> Float[Array, "n n"]:
    """Return the mixing matrix of a step: P[i, j] is the weight of j's message at i, P[i, i] the share that i keeps.

    Args:
        network: Any network.
        key: Key of random links; fixed networks ignore it.
        step: Time of the network, from 0.
        weights: `"push"`, `"gossip"` or `"ones"`, as in `network.links`.

    Example:
        >>> import jax
        >>> import hyperpush as hp
        >>> print(hp.networks.matrix(hp.networks.DirectedRing(3), jax.random.key(0), 0))
        [[0.5 0.  0.5]
         [0.5 0.5 0. ]
         [0.  0.5 0.5]]
    """
    links = network.links(key, step, jnp.arange(network.clients), weights, padded=False)
    return mixing_matrix(links, network.clients)


def mixing_matrix(links: Links, clients: int) -> Float[Array, "n n"]:
    """Return the mixing matrix from the links of all clients."""
    dense = densify(links, clients)
    return dense.weights.T + jnp.diag(dense.own)


def _sum(links: Links, leaf: Array, clients: int) -> Array:
    # Half-precision values are summed in the type of the weights, and the sum is returned in half precision.
    wide = jnp.promote_types(leaf.dtype, links.weights.dtype)
    narrow = leaf.dtype if jnp.issubdtype(leaf.dtype, jnp.inexact) else wide
    flat = leaf.reshape(leaf.shape[0], -1).astype(wide)
    weights = links.weights.astype(wide)
    if links.targets is None and flat.shape[1] <= NARROW and weights.size <= SMALL:
        out = jnp.sum(weights[None] * flat.T[:, :, None], axis=1).T
    elif links.targets is None:
        out = jnp.einsum("ji,jd->id", weights, flat, precision=jax.lax.Precision.HIGHEST)
    else:
        empty = jnp.zeros((clients, flat.shape[1]), wide)
        out = _by_slot("add", links, weights, lambda weight: weight[:, None] * flat, empty)
    return out.reshape(clients, *leaf.shape[1:]).astype(narrow)


def _max(links: Links, leaf: Array, clients: int) -> Array:
    low = lowest(leaf.dtype)
    flat = leaf.reshape(leaf.shape[0], -1)
    if links.targets is None:
        out = jnp.max(jnp.where(links.alive[:, :, None], flat[:, None], low), axis=0, initial=low)
    else:
        empty = jnp.full((clients, flat.shape[1]), low, leaf.dtype)
        out = _by_slot("max", links, links.alive, lambda alive: jnp.where(alive[:, None], flat, low), empty)
    return out.reshape(clients, *leaf.shape[1:])


def _by_slot(
    update: Literal["add", "max"], links: Links, by_slot: Array, message: Callable[[Array], Array], empty: Array
) -> Array:
    """Combine messages slot by slot, with memory n·d; one scatter of all b·k·d numbers is slower for large d."""

    def slot(out: Array, arriving: tuple[Array, Array]) -> tuple[Array, None]:
        target, own = arriving
        return getattr(out.at[target], update)(message(own)), None

    assert links.targets is not None
    return jax.lax.scan(slot, empty, (links.targets.T, by_slot.T))[0]


def lowest(dtype: jnp.dtype) -> Array:
    """Return the lowest number of a type, which `combine` returns with "max" where no message arrives.

    Args:
        dtype: A floating, integer or boolean type.

    Example:
        >>> import jax.numpy as jnp
        >>> import hyperpush as hp
        >>> print(hp.networks.lowest(jnp.dtype("float32")))
        -inf
    """
    if jnp.issubdtype(dtype, jnp.inexact):
        return jnp.array(-jnp.inf, dtype)
    return jnp.array(False if jnp.issubdtype(dtype, jnp.bool_) else jnp.iinfo(dtype).min, dtype)
