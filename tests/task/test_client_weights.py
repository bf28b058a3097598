"""Clients with different numbers of examples, weighted equally or by their numbers, in closed form."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from wide import float64  # noqa: F401

import hyperpush as hp
from hyperpush.data.batches import open_batch

pytestmark = pytest.mark.usefixtures("float64")
NETWORK = hp.networks.FullyConnected(3)
TRAIN = [np.array([1.0, 2.0]), np.array([6.0]), np.array([0.0, 1.0, 5.0, 9.0])]
VALIDATION = [np.array([1.0]), np.array([2.0, 4.0, 6.0]), np.array([3.0, 5.0])]


def squares(x, hyper, a):
    return (x - a) ** 2 / 2


def make(**options):
    given = {"train": TRAIN, "validation": VALIDATION, "params": 0.0, "hypers": 0.0}
    return hp.Task(inner=squares, outer=squares, penalty=lambda x, hyper: hyper * x, **given, **options)


def mean_of(values, weights):
    means = np.array([own.mean() for own in values])
    return means.mean() if weights == "clients" else np.concatenate(values).mean()


@pytest.mark.parametrize("weights", ["clients", "examples"])
def test_the_inner_solution_is_the_mean_that_was_asked_for(weights):
    trained = hp.train(make(weights=weights), hp.TreeNewton(), NETWORK, key=0)
    np.testing.assert_allclose(trained.params, mean_of(TRAIN, weights))
    # Since x* = a − λ, dF̄/dλ_i = −(x* − b)/3, with both means weighted as requested.
    found = hp.hypergradient(trained.task, hp.TreeCG(), NETWORK, key=0).value
    np.testing.assert_allclose(found, -(mean_of(TRAIN, weights) - mean_of(VALIDATION, weights)) / 3, rtol=1e-5)


def test_mini_batches_and_hypers_by_example_keep_the_weights():
    def inner(x, hyper, a):
        return hyper * (x - a) ** 2 / 2

    given = {"params": 0.0, "hypers": hp.per_example(TRAIN, start=1.0)}
    task = hp.Task(inner=inner, outer=squares, train=TRAIN, validation=VALIDATION, weights="examples", **given)
    problem = task.problem
    for client, own in enumerate(TRAIN):
        data = task.for_client(client).data
        gradient = problem.inner_gradient(jnp.zeros(()), jnp.ones(len(own)), hp.extend.full_batch(data.train))
        np.testing.assert_allclose(gradient, -3 * len(own) / 7 * own.mean())
        batch = hp.extend.minibatch(data.train, 1, jax.random.key(0))
        picked = float(open_batch(batch)[0][0])
        gradient = problem.inner_gradient(jnp.zeros(()), jnp.ones(len(own)), batch)
        np.testing.assert_allclose(gradient, -3 * len(own) / 7 * picked)


def test_metrics_are_not_weighted():
    metrics = {"value": lambda x, hyper, a: 0 * a + 2.0}
    history = hp.train(make(weights="examples"), hp.SGP(1, 0.1), NETWORK, key=0, metrics=metrics).history
    assert history is not None
    np.testing.assert_array_equal(history.metrics["value"], 2.0)


def test_shares_are_those_of_the_training_examples():
    assert make().shares == (1 / 3, 1 / 3, 1 / 3)
    assert make(weights="examples").shares == pytest.approx(tuple(np.array([2, 1, 4]) / 7))


def test_what_does_not_fit_is_refused():
    with pytest.raises(hp.InvalidInput, match="weights: got 'records'"):
        make(weights="records")
    party = make(weights="examples").for_client(1, data={"train": TRAIN[1], "validation": VALIDATION[1]})
    with pytest.raises(hp.InvalidInput, match="the numbers of examples of all clients are not known"):
        _ = party.data
    with pytest.raises(hp.InvalidInput, match=r"task\.private"):
        make(weights="examples").private(clip=1.0, noise=hp.privacy.Gaussian(1.0))
