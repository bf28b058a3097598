"""What arrives: by matrix, by edges and by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hyperpush import networks
from hyperpush.errors import InvalidInput
from hyperpush.networks.links import densify

KEY = jax.random.key(0)


def values(n: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(n).normal(size=(n, *shape)).astype(np.float32)


@pytest.mark.parametrize("k", [1, 3])
def test_edges_and_matrix_agree(k):
    n = 40
    network = networks.KOut(n, k)
    sent = {"a": values(n, 4), "b": (values(n), values(n, 2, 3))}

    @jax.jit
    def mixed(step):
        links = network.links(KEY, step, jnp.arange(n))
        assert links.targets is not None
        both = networks.combine(links, sent, n), networks.combine(densify(links, n), sent, n)
        return *both, networks.matrix(network, KEY, step) - jnp.diag(links.own)

    for step in range(5):
        by_edges, by_matrix, off_diagonal = mixed(step)
        for edges, dense, leaf in zip(*map(jax.tree.leaves, (by_edges, by_matrix, sent)), strict=True):
            expected = np.tensordot(off_diagonal, leaf, axes=1)
            np.testing.assert_allclose(edges, expected, atol=1e-5)
            np.testing.assert_allclose(dense, expected, atol=1e-5)


def test_blocks_add_up_to_the_whole():
    network = networks.RandomDirected(10)
    sent = values(10, 3)
    whole = networks.combine(network.links(KEY, 1, jnp.arange(10)), sent, 10)
    parts = sum(
        networks.combine(network.links(KEY, 1, jnp.arange(start, start + 5)), sent[start : start + 5], 10)
        for start in (0, 5)
    )
    np.testing.assert_allclose(whole, parts, rtol=1e-5)


@pytest.mark.parametrize("network", [networks.RandomDirected(12, 0.2), networks.KOut(40, 2)])
def test_max_takes_the_largest_heard(network):
    n = network.clients
    links = network.links(KEY, 3, jnp.arange(n), "ones")
    sent = values(n, 2)
    up = np.asarray(networks.matrix(network, KEY, 3, "ones")) * (1 - np.eye(n)) > 0
    expected = np.where(up[:, :, None], sent, -np.inf).max(axis=1)
    assert np.isinf(expected).any(), "the case where nothing is heard must occur"
    np.testing.assert_array_equal(networks.combine(links, sent, n, "max"), expected)
    whole = networks.combine(links, np.arange(n, dtype=np.int32), n, "max")
    lowest = np.iinfo(np.int32).min
    np.testing.assert_array_equal(whole, np.where(up, np.arange(n), lowest).max(axis=1))
    some = np.arange(n) % 3 == 0
    np.testing.assert_array_equal(networks.combine(links, some, n, "max"), (up & some).any(axis=1))


@pytest.mark.parametrize("network", [networks.FullyConnected(20), networks.KOut(40, 2)])
def test_types_of_sums(network):
    n = network.clients
    links = network.links(KEY, 3, jnp.arange(n), "ones")
    counted = networks.combine(links, np.ones(n, np.int32), n)
    expected = np.asarray(networks.matrix(network, KEY, 3, "ones")).sum(axis=1) - 1
    np.testing.assert_array_equal(counted, expected)
    half = networks.combine(links, jnp.ones((n, 2), jnp.bfloat16), n)
    assert half.dtype == jnp.bfloat16
    np.testing.assert_array_equal(half, np.stack([expected, expected], axis=1))


def test_mixing_by_edges_can_be_differentiated():
    network = networks.KOut(30, 2)
    links = network.links(KEY, 3, jnp.arange(30))
    target = jnp.asarray(values(30, 2))
    pulled = jax.grad(lambda sent: jnp.sum(networks.combine(links, sent, 30) * target))(jnp.ones((30, 2)))
    off_diagonal = np.asarray(networks.matrix(network, KEY, 3)) - np.diag(np.asarray(links.own))
    np.testing.assert_allclose(pulled, off_diagonal.T @ target, atol=1e-5)


def test_unknown_ways_are_refused():
    links = networks.FullyConnected(3).links(KEY, 0, jnp.arange(3))
    with pytest.raises((InvalidInput, TypeError)):
        networks.combine(links, jnp.ones(3), 3, "mean")  # pyright: ignore[reportArgumentType]
