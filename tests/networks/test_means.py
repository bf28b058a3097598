"""Expected weights compared with enumeration."""

import itertools

import numpy as np

import hyperpush as hp
from hyperpush.networks.means import gossip_of_independent, of_independent


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
        np.testing.assert_allclose(found.weights[i], push, rtol=1e-12)


def test_gossip_of_independent_links_by_enumeration():
    up = np.random.default_rng(0).uniform(0.2, 1, (4, 4))
    up = np.triu(up, 1) + np.triu(up, 1).T
    pairs, expected = list(itertools.combinations(range(4), 2)), np.zeros((4, 4))
    for state in itertools.product((0, 1), repeat=len(pairs)):
        chance = np.prod([up[pair] if s else 1 - up[pair] for pair, s in zip(pairs, state, strict=True)])
        live = [pair for pair, s in zip(pairs, state, strict=True) if s]
        degree = np.bincount(np.ravel(live).astype(int), minlength=4)
        weights = np.zeros((4, 4))
        for i, j in live:
            weights[i, j] = weights[j, i] = 1 / (1 + max(degree[i], degree[j]))
        expected += chance * (weights + np.diag(1 - weights.sum(axis=0)))
    found = gossip_of_independent(up)
    np.testing.assert_allclose(found.weights, expected, rtol=1e-12)
    np.testing.assert_allclose(found.up, up + np.eye(4), rtol=1e-12)
    np.testing.assert_allclose(found.stationary(), 1, rtol=1e-10)


def test_two_way():
    assert hp.networks.RandomDirected(4).two_way()
    assert hp.networks.KOut(9, k=2).two_way()
    assert hp.networks.Ring(5).two_way()
    assert not hp.networks.DirectedRing(5).two_way()
    assert not hp.networks.OnePeerExponential(8).two_way()
