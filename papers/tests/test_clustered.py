"""FeSEM and FL+HC: their equations in NumPy, on clients in clearly separated groups."""

from typing import Any

import numpy as np
import pytest
from wide import float64  # noqa: F401

import hyperpush as hp
from hyperpush_papers.big_fed.fesem import FeSEM
from hyperpush_papers.big_fed.flhc import FLHC

pytestmark = pytest.mark.usefixtures("float64")

GROUPS = np.array([0, 1, 2, 0, 1, 2, 0, 0])
N, RATE, ROUNDS = len(GROUPS), 0.4, 6
AIMS = np.array([[0.0, 0.0], [10.0, 0.0], [0.0, -7.0]])[GROUPS] + np.random.default_rng(0).normal(0, 0.3, (N, 2))


def squares(x, hyper, aims):
    return 0.5 * ((x - aims) ** 2).sum(-1)


def run(solver, train: Any = AIMS[:, None]):
    task = hp.Task(inner=squares, outer=squares, params=np.zeros(2), hypers=0.0, train=train, outer_on="train")
    return hp.train(task, solver, hp.networks.FullyConnected(N), key=0)


def averaged(x, labels):
    means = {label: x[labels == label].mean(0) for label in set(labels)}
    return np.stack([means[label] for label in labels])


def test_fesem_assigns_and_averages_in_turn():
    # the clusters that k-means finds after one step towards targets that are far apart
    x, labels = np.zeros((N, 2)), GROUPS
    for k in range(ROUNDS):
        x = x - RATE * (x - AIMS)
        if k:
            centers = np.stack([x[labels == label].mean(0) for label in range(3)])
            labels = np.linalg.norm(x[:, None] - centers, axis=-1).argmin(1)
        x = averaged(x, labels)
    found = run(FeSEM(ROUNDS, RATE, clusters=3))
    np.testing.assert_allclose(found.params, x, atol=1e-12)
    assert (found.costs.floats, found.costs.rounds) == (ROUNDS * (1 + 1 + 2), ROUNDS)


def test_flhc_splits_once():
    x = np.zeros((N, 2))
    for k in range(ROUNDS):
        x = averaged(x - RATE * (x - AIMS), np.zeros(N, int) if k < 2 else GROUPS)
    np.testing.assert_allclose(run(FLHC(ROUNDS, RATE, clusters=3, together=2)).params, x, atol=1e-12)


def test_one_cluster_is_federated_averaging_and_weighs_by_examples():
    counts = np.arange(1, N + 1)
    data = [np.repeat(aim[None], count, 0) for aim, count in zip(AIMS, counts, strict=True)]
    found = run(FeSEM(30, RATE, clusters=1), data)
    end = np.average(AIMS, axis=0, weights=counts)
    np.testing.assert_allclose(found.params, np.broadcast_to(end, (N, 2)), atol=1e-5)


@pytest.mark.parametrize("solver", [FeSEM(3, 1e308, clusters=2), FLHC(4, 1e308, clusters=2, together=1)])
def test_steps_that_are_too_large_end_as_diverged(solver):
    with pytest.raises(hp.Diverged):
        run(solver)


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: run(FLHC(1, 0.1, clusters=N + 1)), "FLHC.clusters"),
        (lambda: run(FeSEM(1, 0.1, clusters=N + 1)), "FeSEM.clusters"),
    ],
)
def test_what_cannot_be_used_is_refused(make, field):
    with pytest.raises(hp.InvalidInput) as refused:
        make()
    assert refused.value.field == field
