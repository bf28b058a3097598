"""Expected weights against enumeration."""

import itertools

import numpy as np

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


def test_two_way():
    assert hp.networks.RandomDirected(4).two_way()
    assert hp.networks.KOut(9, k=2).two_way()
    assert hp.networks.Ring(5).two_way()
    assert not hp.networks.DirectedRing(5).two_way()
    assert not hp.networks.OnePeerExponential(8).two_way()
