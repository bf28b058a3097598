"""Expected weights against enumeration and against what the network does."""

import itertools

import jax
import numpy as np
import pytest

import hyperpush as hp
from hyperpush.networks.means import of_independent


def test_independent_links_by_enumeration():
    up = np.random.default_rng(0).uniform(0.2, 1, (4, 4)) * (1 - np.eye(4))
    found = of_independent(up)
    for i in range(4):
        others = [j for j in range(4) if j != i]
        push = np.zeros(4)
        for state in itertools.product((0, 1), repeat=3):
            chance = np.prod([up[i, j] if s else 1 - up[i, j] for j, s in zip(others, state, strict=True)])
            share = chance / (1 + sum(state))
            push[i] += share
            for j, s in zip(others, state, strict=True):
                push[j] += s * share
        np.testing.assert_allclose(found.push[i], push, rtol=1e-12)


@pytest.mark.parametrize(
    "network",
    [
        hp.networks.RandomDirected(5),
        hp.networks.RandomUndirected(5),
        hp.networks.KOut(6, k=2),
        hp.networks.KOut(6, k=3, varying=False),
        hp.networks.OnePeerExponential(6),
        hp.networks.Star(5),
        hp.networks.FullyConnected(4),
    ],
    ids=lambda network: network.name,
)
def test_means_are_what_happens(network):
    means, n, steps = network.means(), network.clients, 6000
    matrices = jax.vmap(lambda step: hp.networks.matrix(network, jax.random.key(1), step, "push"))(np.arange(steps))
    mean = np.asarray(matrices, np.float64).mean(0).T
    np.testing.assert_allclose(means.push, mean, atol=5 * 0.5 / np.sqrt(steps))
    np.testing.assert_allclose(means.up, (np.asarray(matrices) > 0).mean(0).T, atol=5 * 0.5 / np.sqrt(steps))
    np.testing.assert_allclose(means.push.sum(1), 1, rtol=1e-6)
    weights = means.stationary()
    np.testing.assert_allclose(means.push.T @ weights, weights, atol=1e-6)
    assert weights.sum() == pytest.approx(n)
    assert np.all(weights > 0)


def test_two_way():
    assert hp.networks.RandomDirected(4).two_way()
    assert hp.networks.KOut(9, k=2).two_way()
    assert hp.networks.Ring(5).two_way()
    assert not hp.networks.DirectedRing(5).two_way()
    assert not hp.networks.OnePeerExponential(8).two_way()
