"""HGP and the exact estimators compared with the closed form of quadratics in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closed_forms import mean_outer_cost, setting
from wide import float64  # noqa: F401

import hyperpush as hp
from hyperpush.engines.simulate import evaluate
from hyperpush.hypergradients import HypergradientState, oracles
from hyperpush.tasks.logistic import logistic

pytestmark = pytest.mark.usefixtures("float64")


def test_the_closed_form_is_the_derivative_of_the_solved_problem():
    task, first, second, truth, _ = setting(4, 7)
    hypers, step = np.asarray(task.hypers), 1e-5
    for index in np.ndindex(hypers.shape):
        change = np.zeros_like(hypers)
        change[index] = step
        slope = (mean_outer_cost(hypers + change, first, second) - mean_outer_cost(hypers - change, first, second)) / (
            2 * step
        )
        np.testing.assert_allclose(truth[index], slope, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(("clients", "seed"), [(2, 0), (5, 1), (12, 2)])
@pytest.mark.long
def test_everything_agrees_on_directed_time_varying_networks(clients, seed):
    task, _, _, truth, largest = setting(clients, seed)
    whole = task.problem, task.params, task.hypers, task.data
    network = hp.networks.RandomDirected(clients, probability=(0.4, 0.8))
    assert np.linalg.norm(truth) > 0.1
    found = hp.hypergradient(task, hp.HGP(600, 100, 1 / largest), network, key=seed)
    for name, value in {
        "dense": oracles.dense(*whole),
        "HGP": found.value,
    }.items():
        np.testing.assert_allclose(value, truth, rtol=1e-6, atol=1e-6, err_msg=name)
    assert (found.costs.rounds, found.costs.floats) == (600 * 100, 600 * 100 * 5)


def test_minimise_finds_the_solution():
    task = setting(5, 3).task
    found = oracles.minimize(task.problem, jnp.ones_like(task.params), task.hypers, task.data)
    np.testing.assert_allclose(found, task.params, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("network", "options", "tolerance"),
    [
        (hp.networks.FullyConnected(4), {"pushes": 1}, 1e-9),
        (hp.networks.FullyConnected(4), {"pushes": 1, "averaging": "gossip"}, 1e-9),
        (hp.networks.RandomDirected(4), {"pushes": 1, "averaging": "exact"}, 1e-9),
        (hp.networks.StaticUndirected(4, mixing="fastest-mixing"), {"pushes": 60, "averaging": "gossip"}, 1e-8),
        (hp.networks.RandomUndirected(4), {"pushes": 100, "averaging": "gossip"}, 1e-8),
        (hp.networks.RandomDirected(4), {"pushes": 100, "keep_mass": True}, 1e-8),
        (hp.networks.RandomDirected(4), {"pushes": 100, "independent_batches": True}, 1e-8),
    ],
    ids=["complete", "complete-gossip", "exact", "fastest-mixing", "random-gossip", "kept-mass", "two-batches"],
)
def test_every_variant_converges_to_the_truth(network, options, tolerance):
    task, _, _, truth, largest = setting(4, 5)
    estimator = hp.HGP(steps=400, step_size=1 / largest, **options)
    found = hp.hypergradient(task, estimator, network, key=1)
    np.testing.assert_allclose(found.value, truth, rtol=tolerance, atol=tolerance)


def test_few_pushes_leave_a_bias():
    """With few pushes HGP must miss the solution, so the tests above would detect an inexact average."""
    task, _, _, truth, largest = setting(4, 5)
    network = hp.networks.RandomDirected(4)

    def error(pushes):
        estimator = hp.HGP(400, pushes, 1 / largest)
        found = hp.hypergradient(task, estimator, network, key=1)
        return np.linalg.norm(found.value - truth)

    errors = [error(pushes) for pushes in (1, 4, 16)]
    assert errors[0] > 1e-2 > 1e-3 > errors[2]
    assert errors[0] > errors[1] > errors[2]


def test_no_steps_are_the_direct_gradient():
    task, _, second, _, _ = setting(3, 2)
    found = hp.hypergradient(task, hp.HGP(0, 1, 1.0), hp.networks.FullyConnected(3), key=0)
    np.testing.assert_allclose(found.value, (task.hypers - second["hyper_target"]) / 3)
    assert found.costs.rounds == 0


def test_mini_batches_are_unbiased_and_noisy():
    task = logistic(3, 0, examples=30)
    network = hp.networks.FullyConnected(3)  # only the batches are random
    states = HypergradientState(task.params + 0.3, task.hypers, jnp.zeros_like(task.hypers))
    keys = jax.random.split(jax.random.key(9), 3000)

    def value(estimator, key):
        return evaluate(estimator.program(task.problem), network, states, task.data, key)[0].value

    draws = jax.jit(jax.vmap(lambda key: value(hp.HGP(15, 1, 1.0, batch_size=5), key)))(keys)
    truth = value(hp.HGP(15, 1, 1.0), keys[0])
    spread = draws.std(0)
    assert np.all(spread > 1e-5)
    assert np.all(np.abs(draws.mean(0) - truth) < 4.5 * spread / np.sqrt(len(keys)))


def test_a_step_that_diverges_is_reported_with_its_round():
    task, network = setting(3, 2).task, hp.networks.FullyConnected(3)
    with pytest.raises(hp.Diverged, match=r"HGP diverged \(NaN or infinity\) in round") as caught:
        hp.hypergradient(task, hp.HGP(2000, 1, 9.0), network, key=0)
    # In float64, divergence by |1 − 9λ| per round takes hundreds of rounds; one round less is still finite.
    found = hp.hypergradient(task, hp.HGP(caught.value.round - 1, 1, 9.0), network, key=0)
    assert np.all(np.isfinite(found.value))
    assert caught.value.round > 50
