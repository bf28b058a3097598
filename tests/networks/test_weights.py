"""Doubly stochastic weights of fixed graphs."""

import sys

import jax
import networkx as nx
import numpy as np
import pytest

from hyperpush import networks
from hyperpush.base.errors import InvalidInput
from hyperpush.networks.weights import doubly_stochastic


def chain(network) -> np.ndarray:
    """Return the gossip matrix of a network in float64."""
    table = network.table
    matrix = np.diag(table.own[0])
    for sender, slot in zip(*np.nonzero(table.alive[0]), strict=True):
        receiver = slot if table.targets is None else table.targets[0, sender, slot]
        matrix[receiver, sender] = table.gossip[0, sender, slot]
    return matrix


def rate(matrix: np.ndarray) -> float:
    return float(np.linalg.norm(matrix - 1 / len(matrix), 2))


def ring_rate(n: int) -> float:
    """Return a ring's optimal rate: equal weights that balance the second and the last eigenvalue."""
    second, last = np.cos(2 * np.pi / n), np.cos(2 * np.pi * (n // 2) / n)
    return 1 - 2 * (1 - second) / (2 - second - last)


# The rate of a path of n clients is cos(π/n) with weights 1/2 (Boyd, Diaconis, Sun & Xiao 2006). A star has weights
# 1/(n−1). Beyond 30 clients another solver is used. Networks are created in the tests, so that collecting the tests
# solves nothing.
@pytest.mark.parametrize(
    ("make", "of", "best"),
    [
        (networks.Ring, 5, ring_rate(5)),
        (networks.Ring, 33, ring_rate(33)),
        (networks.Star, 7, 5 / 6),
        (networks.Star, 40, 38 / 39),
        (networks.FromGraph, nx.path_graph(6), np.cos(np.pi / 6)),
        (networks.FromGraph, nx.path_graph(32), np.cos(np.pi / 32)),
        (networks.FromGraph, nx.complete_graph(4), 0),
    ],
    ids=["ring-5", "ring-33", "star-7", "star-40", "path-6", "path-32", "complete-4"],
)
def test_fastest_mixing_matches_closed_forms(make, of, best):
    assert rate(chain(make(of, mixing="fastest-mixing"))) == pytest.approx(best, abs=1e-5)


@pytest.mark.parametrize("n", [12, 36])
def test_fastest_mixing_is_doubly_stochastic_and_beats_metropolis(n):
    fastest = chain(networks.StaticUndirected(n, seed=2, mixing="fastest-mixing"))
    plain = chain(networks.StaticUndirected(n, seed=2))
    for matrix in (fastest, plain):
        assert matrix.min() >= -1e-15
        np.testing.assert_allclose(matrix.sum(axis=0), 1, atol=1e-12)
        np.testing.assert_array_equal(matrix, matrix.T)
    np.testing.assert_array_equal(fastest * (plain == 0), 0)
    assert rate(fastest) < rate(plain) - 0.05


def test_metropolis_on_a_star():
    matrix = np.asarray(networks.matrix(networks.Star(5), jax.random.key(0), 0, "gossip"))
    expected = np.diag([0.2, 0.8, 0.8, 0.8, 0.8])
    expected[0, 1:] = expected[1:, 0] = 0.2
    np.testing.assert_allclose(matrix, expected, rtol=1e-6)


def test_too_large_and_unknown_mixing_are_refused():
    with pytest.raises(InvalidInput, match="200") as refused:
        networks.Ring(201, mixing="fastest-mixing")
    assert refused.value.field == "mixing"
    with pytest.raises(InvalidInput, match="did you mean 'metropolis'"):
        doubly_stochastic(networks.Ring(3).possible(), "metropoli")
    with pytest.raises(InvalidInput, match="directed"):
        networks.FromGraph(nx.cycle_graph(3, create_using=nx.DiGraph), mixing="fastest-mixing")


def test_a_missing_package_is_one_line_that_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "cvxpy", None)
    with pytest.raises(InvalidInput, match=r"cvxpy.*pip install 'hyperpush\[fastest-mixing\]'"):
        networks.Ring(5, mixing="fastest-mixing")
