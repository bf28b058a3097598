"""Multiply the mixing matrices of several averaging rounds into one, because links do not depend on the values."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from hyperpush.engines.compiled.placement import alive_rows
from hyperpush.networks import Network, Weights
from hyperpush.networks.mixing import mixing_matrix


def composes(network: Network, floats: int) -> bool:
    """Return True if an average of `floats` numbers per client is faster when its mixing matrices are multiplied first.

    S products of n×n matrices cost less than S products of such a matrix with n×`floats` values if n is below `floats`.
    For tiny n only the number of operations matters.
    """
    n = network.clients
    links = jax.eval_shape(lambda: network.links(jax.random.key(0), 0, jnp.arange(n), "ones"))
    return links.targets is None and (n <= 8 or 2 * n <= floats)


def compose_rounds(
    network: Network, key: PRNGKeyArray, step: Int[Array, ""], rounds: int, weights: Weights
) -> tuple[Float[Array, "n n"], Int[Array, " n"]]:
    """Return the product of the mixing matrices of `rounds` steps from `step` on, and each client's message count."""
    n = network.clients

    def at(step: Int[Array, ""]) -> tuple[Array, Bool[Array, "n n"]]:
        links = network.links(key, step, jnp.arange(n), weights, padded=False)
        return mixing_matrix(links, n), alive_rows(links, n)

    if rounds == 0:
        return jnp.eye(n), jnp.zeros(n, jnp.int32)
    if not network.varying:
        mixing, alive = at(step)
        return power(mixing, rounds), rounds * count_alive(alive)
    if rounds * n * n > 1_000_000:

        def once(s, so_far):
            mixing, alive = at(step + s)
            return exact_matmul(mixing, so_far[0]), so_far[1] + count_alive(alive)

        mixing, alive = at(step)
        return jax.lax.fori_loop(1, rounds, once, (mixing, count_alive(alive)))
    # All steps at once, multiplied in pairs: log2(S) batched products instead of S small ones in a row.
    products, alive = jax.vmap(at)(step + jnp.arange(rounds))
    sent = jnp.sum(alive, axis=(0, 2), dtype=jnp.int32)
    while products.shape[0] > 1:
        last = products[products.shape[0] // 2 * 2 :]
        products = jnp.concatenate([exact_matmul(products[1::2], products[: products.shape[0] // 2 * 2 : 2]), last])
    return products[0], sent


def count_alive(alive: Bool[Array, "b links"]) -> Int[Array, " b"]:
    return jnp.sum(alive, axis=1, dtype=jnp.int32)


def power(a: Array, exponent: int) -> Array:
    """Return aᵏ by repeated squaring."""
    if exponent == 1:
        return a
    half = power(a, exponent // 2)
    square = exact_matmul(half, half)
    return exact_matmul(square, a) if exponent % 2 else square


def exact_matmul(a: Array, b: Array) -> Array:
    if a.shape[-1] <= 8:  # tiny products as one fused elementwise loop instead of library calls
        return jnp.sum(a[..., :, :, None] * b[..., None, :, :], axis=-2)
    return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)
