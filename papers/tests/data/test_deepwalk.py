"""Random walks follow links, counts match their window, and embeddings separate the two sides of the club."""

import networkx as nx
import numpy as np
import pytest
import scipy.stats

from hyperpush_papers.common.data.deepwalk import co_occurrences, embedding, walks

KARATE = nx.karate_club_graph()
WEIGHTS = (nx.to_numpy_array(KARATE) > 0).astype(float)


def test_walks_follow_links_in_proportion_to_their_weights():
    weights = np.array([[0.0, 3, 1, 0], [3, 0, 0, 0], [1, 0, 0, 2], [0, 0, 2, 0]])
    seen = walks(weights, 500, 9, np.random.default_rng(0))
    assert seen.shape == (2000, 9)
    np.testing.assert_array_equal(np.bincount(seen[:, 0]), [500] * 4)
    assert (weights[seen[:, :-1], seen[:, 1:]] > 0).all()
    for node in (0, 2):  # the other nodes have one neighbor
        after = np.bincount(seen[:, 1:][seen[:, :-1] == node], minlength=4)
        share = weights[node] / weights[node].sum()
        possible = share > 0
        chance = scipy.stats.chisquare(after[possible], after.sum() * share[possible]).pvalue
        assert chance > 1e-4


def test_co_occurrences_by_hand():
    expected = np.zeros((4, 4))
    for walk in ([0, 1, 2, 3], [3, 3, 0, 1]):
        for i, u in enumerate(walk):
            for j, v in enumerate(walk):
                expected[u, v] += 0 < abs(i - j) <= 2
    np.testing.assert_array_equal(co_occurrences(np.array([[0, 1, 2, 3], [3, 3, 0, 1]]), 4, 2), expected)


def test_places_factorize_the_log_ratios():
    """With all dimensions, e·eᵀ is the positive part of the log-ratios; with two, its best rank-2 fit."""
    generator = np.random.default_rng
    counts = co_occurrences(walks(WEIGHTS, 10, 40, generator(3)), 34, 5) + 0.5
    each = counts.sum(1)
    matrix = np.log(counts * counts.sum() / np.outer(each, each))
    full, two = (embedding(WEIGHTS, k, generator(3)) for k in (34, 2))
    rest = np.linalg.eigvalsh(matrix - full @ full.T)
    assert rest.max() < 1e-9
    np.testing.assert_allclose(two, full[:, :2])
    np.testing.assert_allclose(two.T @ two, np.diag(np.linalg.eigvalsh(matrix)[:-3:-1]), atol=1e-9)
    assert (two[np.abs(two).argmax(0), [0, 1]] > 0).all()


@pytest.mark.parametrize("seed", range(3))
def test_the_first_coordinate_tells_the_two_clubs_apart(seed):
    first = embedding(WEIGHTS, 2, np.random.default_rng(seed))[:, 0]
    club = np.array([KARATE.nodes[node]["club"] == "Mr. Hi" for node in KARATE])
    # Members 2 and 8 have as many friends on one side as on the other.
    assert np.sum((first > 0) == club) in (*range(3), *range(32, 35))
