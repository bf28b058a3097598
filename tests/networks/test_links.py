"""Properties of single links: their random bits, their precision and their layout."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hyperpush import networks
from hyperpush.base.errors import InvalidInput
from hyperpush.networks.hashing import words
from hyperpush.networks.links import densify


def test_metropolis_on_random_links_is_exactly_doubly_stochastic():
    network = networks.RandomUndirected(97, 0.5)
    matrix = np.asarray(networks.matrix(network, jax.random.key(0), 11, "gossip"), np.float64)
    np.testing.assert_array_equal(matrix.sum(axis=0), 1)
    up = (matrix > 0) & ~np.eye(97, dtype=bool)
    degrees = up.sum(axis=0)
    expected = up / (1 + np.maximum(degrees[:, None], degrees))
    np.testing.assert_allclose(np.where(up, matrix, 0), expected, atol=2**-24)


def test_densify_moves_numbers_and_changes_none():
    network = networks.KOut(50, 3)
    links = network.links(jax.random.key(0), 4, jnp.arange(50))
    dense = jax.device_get(densify(links, 50))
    assert links.targets is not None
    assert dense.targets is None
    rows = np.arange(50)[:, None]
    np.testing.assert_array_equal(np.asarray(dense.weights)[rows, links.targets], links.weights)
    assert dense.alive.sum() == 150


@pytest.mark.long
def test_random_words_are_uniform_and_unrelated():
    """For neighboring indices, steps and keys, the bits of the words are fair coins, alone and in pairs."""
    index = jnp.arange(4096, dtype=jnp.uint32)
    drawn = jax.vmap(
        lambda seed: jax.vmap(lambda step: words(jax.random.key(seed), step, index))(jnp.arange(32, dtype=jnp.int32))
    )(jnp.arange(8))
    drawn = np.asarray(drawn)  # [keys, steps, indices]
    bits = np.unpackbits(drawn.view(np.uint8), axis=-1).reshape(*drawn.shape, 32).astype(np.float64) * 2 - 1
    coins = {"bits": bits, "neighbouring bits": bits[..., 1:] * bits[..., :-1]}
    for axis, name in enumerate(("keys", "steps", "indices")):
        first, second = (np.delete(bits, end, axis=axis) for end in (-1, 0))
        coins[name] = first * second
    for name, coin in coins.items():
        means = coin.reshape(-1, coin.shape[-1]).mean(axis=0)
        bound = 5 / np.sqrt(coin.size / coin.shape[-1])  # five standard errors of a mean of fair coins
        assert np.abs(means).max() < bound, name
    counts = np.bincount((drawn >> 24).ravel(), minlength=256)
    chi_square = ((counts - drawn.size / 256) ** 2 / (drawn.size / 256)).sum()
    assert abs(chi_square - 255) < 5 * np.sqrt(2 * 255)


def test_weights_follow_the_precision_switch():
    with jax.enable_x64(True):
        network = networks.StaticUndirected(10)
        links = network.links(jax.random.key(0), 0, jnp.arange(10), "gossip")
        assert links.weights.dtype == jnp.float64
        total = np.asarray(links.weights).sum(axis=1) + np.asarray(links.own)
        np.testing.assert_allclose(total, 1, atol=1e-15)
        alive = networks.RandomDirected(10).links(jax.random.key(0), 3, jnp.arange(10)).alive
    np.testing.assert_array_equal(alive, networks.RandomDirected(10).links(jax.random.key(0), 3, jnp.arange(10)).alive)


@pytest.mark.parametrize("network", [networks.RandomDirected(4), networks.KOut(4, 1), networks.DirectedRing(4)])
def test_gossip_is_refused_on_directed_networks(network):
    with pytest.raises(InvalidInput, match=network.name) as refused:
        network.links(jax.random.key(0), 0, jnp.arange(4), "gossip")
    assert refused.value.field == "weights"


def test_large_k_out_is_sparse():
    network = networks.KOut(100_000, 5)
    links = jax.jit(lambda step: network.links(jax.random.key(0), step, jnp.arange(100_000)))(2)
    assert links.targets is not None
    assert links.targets.shape == links.weights.shape == (100_000, 5)
    received = networks.combine(links, jnp.ones(100_000), 100_000) + links.own
    assert float(received.sum()) == pytest.approx(100_000, rel=1e-5)
