"""Tracked HGP has no bias on any network; the guard is HGP, which has one at the same number of pushes."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from closed_forms import setting
from wide import float64  # noqa: F401

import hyperpush as hp
from hyperpush.engine import peer, simulate
from hyperpush.estimators import oracles
from hyperpush.estimators.estimate import start
from hyperpush.problems.logistic import logistic
from hyperpush.problems.quadratic import quadratic

pytestmark = pytest.mark.usefixtures("float64")


@pytest.mark.parametrize(
    ("network", "steps", "step", "pushes"),
    [
        (hp.networks.FullyConnected(8), 200, 0.5, 1),
        (hp.networks.RandomDirected(8), 400, 0.3, 1),
        (hp.networks.KOut(8, k=3), 800, 0.1, 1),
        (hp.networks.StaticUndirected(8), 800, 0.1, 2),
        (hp.networks.OnePeerExponential(8), 800, 0.1, 3),
        (hp.networks.DirectedRing(8), 1500, 0.05, 20),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_no_bias_on_any_network(network, steps, step, pushes):
    problem, at, hypers, first, second, truth, largest = setting(8, 6)
    estimator = hp.TrackedHGP(steps, step / largest, pushes, tolerance=None, acceleration=0)
    found = hp.hypergradient(problem, estimator, network, at, hypers, first, second, jax.random.key(1))
    np.testing.assert_allclose(found.value, truth, rtol=1e-8, atol=1e-8)
    assert (found.rounds, found.floats) == (steps * pushes, steps * pushes * (4 + 1 + 4))


@pytest.mark.parametrize("run", [simulate.run, peer.run], ids=["simulate", "peer"])
def test_no_bias_where_messages_get_lost(run):
    problem, at, hypers, first, second, truth, largest = setting(4, 5)
    estimator, network = (
        hp.TrackedHGP(1500 if run is simulate.run else 40, 0.05 / largest, 1, tolerance=None, acceleration=0),
        hp.networks.RandomDirected(4),
    )
    arguments = (problem, estimator, network, at, hypers, first, second, jax.random.key(1))
    faults = hp.Faults(loss=0.3, duplicate=0.1, delay=2)
    found = hp.hypergradient(*arguments, faults=faults, run=run)
    if run is simulate.run:
        np.testing.assert_allclose(found.value, truth, rtol=1e-6, atol=1e-6)
    else:
        np.testing.assert_allclose(found.value, hp.hypergradient(*arguments, faults=faults).value, rtol=1e-8)


@pytest.mark.parametrize(
    "network",
    [
        hp.networks.RandomDirected(8),
        hp.networks.KOut(8, k=3),
        hp.networks.OnePeerExponential(8),
        hp.networks.StaticUndirected(8),
        hp.networks.DirectedRing(8),
    ],
    ids=lambda network: network.name,
)
def test_nothing_needs_to_be_set(network):
    problem, at, hypers, first, second, truth, _ = setting(8, 6)
    found = hp.hypergradient(
        problem, hp.TrackedHGP(tolerance=1e-9), network, at, hypers, first, second, jax.random.key(1)
    )
    np.testing.assert_allclose(found.value, truth, rtol=1e-6, atol=1e-7)
    # Far fewer rounds than at most: it has ended by agreement.
    assert found.rounds < 500 * network.flood_rounds()


def test_unlike_clients_and_indefinite_costs_need_nothing_either():
    """Hessians that differ a hundredfold, some of them indefinite; only their mean is positive definite."""
    problem, at, hypers, first, second, _, _ = setting(8, 6)
    generator = np.random.default_rng(0)
    scales = 10 ** generator.uniform(-1, 1, 8)
    noise = generator.normal(size=(8, 4, 4)) * 0.5
    hessian = first["hessian"] * scales[:, None, None] + noise + noise.transpose(0, 2, 1)
    assert np.linalg.eigvalsh(hessian)[:, 0].min() < 0 < np.linalg.eigvalsh(hessian.mean(0))[0]
    first = {**first, "hessian": hessian}
    data = hp.Data(first, second)
    truth = oracles.dense(problem, at, hypers, data)
    found = hp.hypergradient(
        problem,
        hp.TrackedHGP(tolerance=1e-9),
        hp.networks.OnePeerExponential(8),
        at,
        hypers,
        first,
        second,
        jax.random.key(1),
    )
    np.testing.assert_allclose(found.value, truth, rtol=1e-6, atol=1e-7)


def test_mini_batch_noise_falls_with_the_number_of_steps():
    made = logistic(3, 0, examples=8)
    network = hp.networks.RandomDirected(3)
    data, at = hp.Data(made.inner_data, made.outer_data), made.params + 0.3
    truth = oracles.dense(made.problem, at, made.hypers, data)

    def error(steps):
        def one(key):
            program = hp.TrackedHGP(steps, batch=2, pushes=1).program(made.problem)
            return simulate.evaluate(program, network, start(at, made.hypers), data, key)[0].value

        found = np.asarray(jax.jit(jax.vmap(one))(jax.random.split(jax.random.key(0), 40)))
        return np.sqrt(np.mean((found - truth) ** 2))

    # Independent noise in every step: sixteen times the steps, a quarter of the error.
    assert error(1600) < 0.4 * error(100)


def test_an_outer_step_starts_where_the_last_one_ended():
    """With the same problem again there is nothing left to do but vote."""
    problem, at, hypers, first, second, truth, _ = setting(4, 5)
    estimator, network = hp.TrackedHGP(tolerance=1e-9), hp.networks.RandomDirected(4)
    program = estimator.program(problem)
    states = start(at, hypers)
    states = replace(states, memory=jax.vmap(estimator.memory)(states.params, states.hyper))
    data = hp.Data(first, second)
    cold = simulate.run(program, network, states, data, jax.random.key(0))
    warm = simulate.run(program, network, cold.states, data, jax.random.key(1), step=cold.step)
    assert warm.rounds < cold.rounds / 2
    np.testing.assert_allclose(warm.states.value, truth, rtol=1e-7, atol=1e-8)


def test_too_large_a_step_is_reported():
    problem, at, hypers, first, second, _, largest = setting(4, 5)
    with pytest.raises(hp.Diverged, match=r"TrackedHGP: left the finite numbers in round \d+"):
        hp.hypergradient(
            problem,
            hp.TrackedHGP(3000, 9 / largest, 1, tolerance=None, acceleration=0),
            hp.networks.RandomDirected(4),
            at,
            hypers,
            first,
            second,
            jax.random.key(1),
        )


def test_acceleration_that_makes_things_worse_is_given_up():
    """A client whose Hessian is zero is led astray by its own changes; plain steps bring everyone back."""
    problem, params, hypers, first, second = quadratic(3, 0)
    first = {**first, "hessian": first["hessian"].at[0].set(0)}
    network = hp.networks.by_name("random-directed", 3, 0)
    arguments = (network, params, hypers, first, second, jax.random.key(0))
    truth = hp.hypergradient(problem, hp.Dense(), *arguments).value
    found = hp.hypergradient(problem, hp.TrackedHGP(600, pushes=3, tolerance=None), *arguments)
    np.testing.assert_allclose(found.value, truth, rtol=1e-6)


def test_without_cooperation():
    problem, at, hypers, first, second, _, _ = setting(4, 5)
    network, n = hp.networks.FullyConnected(4), 4
    arguments = (network, at, hypers, first, second, jax.random.key(1))
    direct = hp.hypergradient(problem, hp.DirectGradient(), *arguments)
    np.testing.assert_allclose(direct.value, hypers - second["hyper_target"])
    local = hp.hypergradient(problem, hp.LocalGradient(20, damping=0.3), *arguments)
    for i in range(n):
        pull = second["map"][i].T @ (second["map"][i] @ np.asarray(at[i]) - second["target"][i])
        damped = first["hessian"][i] + 0.3 * np.eye(len(pull))
        expected = direct.value[i] - first["coupling"][i] @ np.linalg.solve(damped, pull)
        np.testing.assert_allclose(local.value[i], expected, rtol=1e-8)
    assert direct.rounds == local.rounds == 0
