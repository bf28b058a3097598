"""Received values computed by matrix, by edges and by hand."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hyperpush import networks
from hyperpush.base.errors import InvalidInput
from hyperpush.networks.links import densify

KEY = jax.random.key(0)
combine = jax.jit(networks.combine, static_argnames=("clients", "reduce"))


@partial(jax.jit, static_argnames="weights")
def links_of(network, step, senders, weights="push"):
    return network.links(KEY, step, senders, weights)


@partial(jax.jit, static_argnames="weights")
def others(network, step, weights: networks.Weights = "push"):
    """Return the mixing matrix without its diagonal."""
    mixed = networks.matrix(network, KEY, step, weights)
    return jnp.where(jnp.eye(network.clients, dtype=bool), 0, mixed)


def values(n: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(n).normal(size=(n, *shape)).astype(np.float32)


@pytest.mark.parametrize("k", [1, 3])
def test_edges_and_matrix_agree(k):
    n = 40
    network = networks.KOut(n, k)
    sent = {"a": values(n, 4), "b": (values(n), values(n, 2, 3))}

    @jax.jit
    def mixed(step):
        links = links_of(network, step, jnp.arange(n))
        assert links.targets is not None
        both = combine(links, sent, n), combine(densify(links, n), sent, n)
        return *both, others(network, step)

    for step in range(5):
        by_edges, by_matrix, off_diagonal = mixed(step)
        for edges, dense, leaf in zip(*map(jax.tree.leaves, (by_edges, by_matrix, sent)), strict=True):
            expected = np.tensordot(off_diagonal, leaf, axes=1)
            np.testing.assert_allclose(edges, expected, atol=1e-5)
            np.testing.assert_allclose(dense, expected, atol=1e-5)


def test_blocks_add_up_to_the_whole():
    network = networks.RandomDirected(10)
    sent = values(10, 3)
    whole = combine(links_of(network, 1, jnp.arange(10)), sent, 10)
    parts = sum(
        combine(links_of(network, 1, jnp.arange(start, start + 5)), sent[start : start + 5], 10) for start in (0, 5)
    )
    np.testing.assert_allclose(whole, parts, rtol=1e-5)


# At odd steps every other client of the trace sends nothing: its slot is down.
SILENT = networks.Trace(40, [[(i, (i + 1) % 40) for i in range(40)], [(i, i + 1) for i in range(0, 40, 2)]])


@pytest.mark.parametrize("network", [networks.RandomDirected(12, 0.1), networks.KOut(40, 2), SILENT])
def test_max_takes_the_largest_heard(network):
    n = network.clients
    links = links_of(network, 3, jnp.arange(n), "ones")
    sent = values(n, 2)
    up = np.asarray(others(network, 3, "ones")) > 0
    expected = np.where(up[:, :, None], sent, -np.inf).max(axis=1)
    assert np.isinf(expected).any(), "the case where nothing is heard must occur"
    np.testing.assert_array_equal(combine(links, sent, n, "max"), expected)
    whole = combine(links, np.arange(n, dtype=np.int32), n, "max")
    lowest = np.iinfo(np.int32).min
    np.testing.assert_array_equal(whole, np.where(up, np.arange(n), lowest).max(axis=1))
    some = np.arange(n) % 3 == 0
    np.testing.assert_array_equal(combine(links, some, n, "max"), (up & some).any(axis=1))


@pytest.mark.parametrize("network", [networks.FullyConnected(20), networks.KOut(40, 2), SILENT])
def test_types_of_sums(network):
    n = network.clients
    links = links_of(network, 3, jnp.arange(n), "ones")
    counted = combine(links, np.ones(n, np.int32), n)
    expected = np.asarray(others(network, 3, "ones")).sum(axis=1)
    np.testing.assert_array_equal(counted, expected)
    half = combine(links, jnp.ones((n, 2), jnp.bfloat16), n)
    assert half.dtype == jnp.bfloat16
    np.testing.assert_array_equal(half, np.stack([expected, expected], axis=1))


def test_mixing_by_edges_can_be_differentiated():
    network = networks.KOut(30, 2)
    links = links_of(network, 3, jnp.arange(30))
    target = jnp.asarray(values(30, 2))
    pulled = jax.grad(lambda sent: jnp.sum(combine(links, sent, 30) * target))(jnp.ones((30, 2)))
    np.testing.assert_allclose(pulled, np.asarray(others(network, 3)).T @ target, atol=1e-5)


def test_unknown_ways_are_refused():
    links = links_of(networks.FullyConnected(3), 0, jnp.arange(3))
    with pytest.raises((InvalidInput, TypeError)):
        combine(links, jnp.ones(3), 3, "mean")  # pyright: ignore[reportArgumentType]
