"""Partitions use every example once, have the defined sizes and distributions, and padding loses nothing."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyperpush.base.errors import InvalidInput
from hyperpush.data.batches import ragged
from hyperpush_papers.common.data import partition
from hyperpush_papers.common.data.sources import Dataset


def generator(seed=0):
    return np.random.default_rng(seed)


def each_once(owned, examples):
    np.testing.assert_array_equal(np.sort(np.concatenate(owned)), np.arange(examples))


def test_iid_deals_out_everything():
    owned = partition.iid(23, 5, generator())
    each_once(owned, 23)
    assert sorted(map(len, owned)) == [4, 4, 5, 5, 5]
    assert np.any(np.diff(np.concatenate(owned)) != 1)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 12),
    st.integers(0, 6),
    st.sampled_from([1e-8, 1e-3, 0.4, 1e6]),
    st.integers(1, 5),
    st.integers(0, 2**32),
)
def test_dirichlet_always_ends_with_the_least_size(clients, least, concentration, classes, seed):
    labels = generator(seed).integers(0, classes, clients * max(least, 1) + seed % 7)
    owned = partition.dirichlet(labels, clients, concentration, generator(seed), least=least)
    each_once(owned, len(labels))
    assert min(map(len, owned)) >= least
    again = partition.dirichlet(labels, clients, concentration, generator(seed), least=least)
    assert all(np.array_equal(a, b) for a, b in zip(owned, again, strict=True))


def test_dirichlet_proportions_have_the_moments_of_their_distribution():
    """Symmetric Dirichlet(α) over n: each share has mean 1/n and variance (1/n)(1 − 1/n)/(nα + 1)."""
    n, classes, each, concentration = 5, 400, 200, 0.4
    labels = np.repeat(np.arange(classes), each)
    owned = partition.dirichlet(labels, n, concentration, generator(1), least=0)
    shares = partition.counts(labels, classes, owned) / each
    variance = (1 / n) * (1 - 1 / n) / (n * concentration + 1)
    np.testing.assert_allclose(shares.mean(1), 1 / n, atol=4 * np.sqrt(variance / classes))
    assert shares.var() == pytest.approx(variance, rel=0.1)
    even = partition.counts(labels, classes, partition.dirichlet(labels, n, 1e6, generator(1))) / each
    np.testing.assert_allclose(even, 1 / n, atol=0.01)


COARSE = np.repeat(np.arange(4), 300)
FINE = np.repeat(np.arange(12), 100)  # three to each coarse label


def test_pachinko_gives_all_clients_as_many_and_nothing_twice():
    owned = partition.pachinko(COARSE, FINE, 7, generator(2))
    assert {len(own) for own in owned} == {1200 // 7}
    assert len(np.unique(np.concatenate(owned))) == 7 * (1200 // 7)
    each_once(partition.pachinko(COARSE, FINE, 6, generator(2)), 1200)  # the last client takes the remaining examples


def test_pachinko_is_uneven_in_coarse_labels_and_even_within_them(monkeypatch):
    """For the first of many clients no label runs out, so its shares of coarse labels have the Dirichlet variance."""
    monkeypatch.setattr(partition, "FINE", 1e6)
    many = 10
    coarse, fine = np.repeat(COARSE, many), np.repeat(FINE, many)
    alpha, found = 0.4, []
    for seed in range(150):
        first = partition.pachinko(coarse, fine, 30, generator(seed))[0]
        found.append(partition.counts(fine, 12, [first])[0].reshape(4, 3))
    shares = np.array(found).sum(2) / 400
    variance = (1 / 4) * (3 / 4) / (4 * alpha + 1)
    np.testing.assert_allclose(shares.mean(0), 1 / 4, atol=4 * np.sqrt(variance / 150))
    # Drawing 400 examples adds a variance of at most (1/4)(3/4)/400.
    assert shares.var(0).mean() == pytest.approx(variance, rel=0.2)
    big = np.array(found)[shares > 0.5]
    np.testing.assert_allclose((big / big.sum(1, keepdims=True)).mean(0), 1 / 3, atol=0.02)


def dataset(m=30):
    inputs = np.arange(m * 4, dtype=np.float32).reshape(m, 2, 2)
    return Dataset("toy", inputs, np.arange(m) % 3, 3, "a note")


@pytest.mark.parametrize(
    ("size", "shares", "sizes"),
    [
        (100, {}, (60, 20, 20)),  # EMNIST: 20 % for testing, the rest 3:1
        (3000, {"test": 0.6}, (900, 300, 1800)),  # CIFAR-100
        (3, {}, (1, 1, 1)),
        (4, {"test": 0.01}, (2, 1, 1)),
    ],
)
def test_splits_have_their_sizes(size, shares, sizes):
    own = np.arange(size) + 7
    parts = partition.split([own, own], generator(3), **shares)
    assert tuple(len(part[1]) for part in parts) == sizes
    joined = np.concatenate([part[1] for part in parts])
    np.testing.assert_array_equal(np.sort(joined), own)
    if size > 4:
        assert np.any(joined != own)


def test_a_client_without_a_validation_example_is_named():
    with pytest.raises(InvalidInput, match=r"data of client 1: got '2 examples \(0 / 1 / 1\)'; allowed: enough for"):
        partition.split([np.arange(9), np.arange(2)], generator())


def test_clusters_have_a_mean_and_a_bounded_std_of_their_own():
    found = partition.shifts(31, 3, generator(4))
    assert sorted(np.bincount(found.cluster)) == [10, 10, 11]
    for values, low in ((found.mean, 0), (found.std, 0.25)):
        assert len(np.unique(values)) == 3
        assert low <= values.min() <= values.max() <= 1
        for cluster in range(3):
            assert len(np.unique(values[found.cluster == cluster])) == 1
    drawn = [partition.shifts(3, 3, generator(seed)).std for seed in range(300)]
    assert np.min(drawn) >= 0.25
    assert np.mean(drawn) == pytest.approx((0.25 + 1) / 2, abs=4 * 0.75 / np.sqrt(12 * 900))


def test_stacked_data_are_the_examples_and_zeros():
    data, owned = dataset(), [np.array([4, 2, 9]), np.array([7])]
    stacked, plain = partition.stack(data, owned), ragged([(data.inputs[own], data.labels[own]) for own in owned])
    jax.tree.map(np.testing.assert_array_equal, stacked, plain)
    inputs, labels = (np.asarray(each) for each in stacked.examples)
    np.testing.assert_array_equal(stacked.counts, [3, 1])
    np.testing.assert_array_equal(inputs[0], data.inputs[[4, 2, 9]])
    np.testing.assert_array_equal(inputs[1, 0], data.inputs[7])
    np.testing.assert_array_equal(labels, [[1, 2, 0], [1, 0, 0]])
    assert not np.any(inputs[1, 1:])
    shift = partition.Shift(np.array([0, 1]), np.array([2.0, -1.0]), np.array([0.5, 4.0]))
    moved = np.asarray(partition.stack(data, owned, shift).examples[0])
    np.testing.assert_allclose(moved[0], (data.inputs[[4, 2, 9]] - 2) / 0.5)
    np.testing.assert_allclose(moved[1, 0], (data.inputs[7] + 1) / 4)
    assert not np.any(moved[1, 1:])
    np.testing.assert_array_equal(data.inputs, dataset().inputs)  # the data set itself is unchanged
    with pytest.raises(InvalidInput, match=r"data of client 1: got '0 examples'"):
        partition.stack(data, [np.array([1]), np.zeros(0, np.int64)])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: partition.iid(3, 4, generator()), r"clients: got 4; allowed: at most 3: 3 examples, at least 1 each"),
        (lambda: partition.iid(3, 0, generator()), r"clients: got 0; allowed: a whole number from 1"),
        (lambda: partition.dirichlet(FINE, 121, 0.4, generator()), r"clients: got 121; allowed: at most 120"),
        (lambda: partition.dirichlet(FINE, 2, 0, generator()), r"concentration: got 0; allowed: a finite number above"),
        (lambda: partition.dirichlet(FINE, 2, float("nan"), generator()), r"concentration: got nan"),
        (lambda: partition.pachinko(FINE, COARSE, 2, generator()), r"coarse: got .*each fine label in one coarse"),
        (lambda: partition.shifts(2, 3, generator()), r"clusters: got 3; allowed: a whole number from 1 to 2"),
        (lambda: partition.split([FINE], generator(), test=1.5), r"test: got 1.5; allowed: a number from 0 to 1"),
        (lambda: partition.split([FINE], generator(), test=1), r"data of client 0: got '1200 examples \(-1 / 1 / 1200"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(InvalidInput, match=message):
        call()
