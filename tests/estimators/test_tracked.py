"""Tracked HGP has no bias on any network; the guard is HGP, which has one at the same number of pushes."""

import jax
import numpy as np
import pytest
from closed_forms import setting
from wide import float64  # noqa: F401

import hyperpush as hp
from hyperpush.engine import peer, simulate
from hyperpush.estimators.estimate import start
from hyperpush.problems.logistic import logistic

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
    estimator = hp.TrackedHGP(steps, step / largest, pushes)
    found = hp.hypergradient(problem, estimator, network, at, hypers, first, second, jax.random.key(1))
    np.testing.assert_allclose(found.value, truth, rtol=1e-8, atol=1e-8)
    assert (found.rounds, found.floats) == (steps * pushes, steps * pushes * (4 + 1 + 4))


@pytest.mark.parametrize("run", [simulate.run, peer.run], ids=["simulate", "peer"])
def test_no_bias_where_messages_get_lost(run):
    problem, at, hypers, first, second, truth, largest = setting(4, 5)
    estimator, network = (
        hp.TrackedHGP(1500 if run is simulate.run else 40, 0.05 / largest),
        hp.networks.RandomDirected(4),
    )
    arguments = (problem, estimator, network, at, hypers, first, second, jax.random.key(1))
    faults = hp.Faults(loss=0.3, duplicate=0.1, delay=2)
    found = hp.hypergradient(*arguments, faults=faults, run=run)
    if run is simulate.run:
        np.testing.assert_allclose(found.value, truth, rtol=1e-6, atol=1e-6)
    else:
        np.testing.assert_allclose(found.value, hp.hypergradient(*arguments, faults=faults).value, rtol=1e-8)


def test_mini_batch_noise_falls_with_the_step():
    made = logistic(3, 0, examples=30)
    network = hp.networks.RandomDirected(3)

    def spread(step):
        def one(key):
            estimator = hp.TrackedHGP(int(60 / step), step, batch=5)
            states, data = start(made.params + 0.3, made.hypers), hp.Data(made.inner_data, made.outer_data)
            return simulate.evaluate(estimator.program(made.problem), network, states, data, key)[0].value

        return np.asarray(jax.jit(jax.vmap(one))(jax.random.split(jax.random.key(0), 40))).std(0).max()

    assert spread(0.1) < 0.7 * spread(0.4)


def test_too_large_a_step_is_reported():
    problem, at, hypers, first, second, _, largest = setting(4, 5)
    with pytest.raises(hp.Diverged, match=r"TrackedHGP: left the finite numbers in round \d+"):
        hp.hypergradient(
            problem,
            hp.TrackedHGP(3000, 9 / largest),
            hp.networks.RandomDirected(4),
            at,
            hypers,
            first,
            second,
            jax.random.key(1),
        )


def test_without_cooperation():
    problem, at, hypers, first, second, _, _ = setting(4, 5)
    network, n = hp.networks.FullyConnected(4), 4
    arguments = (network, at, hypers, first, second, jax.random.key(1))
    direct = hp.hypergradient(problem, hp.DirectGradient(), *arguments)
    np.testing.assert_allclose(direct.value, hypers - second["hyper_target"])
    local = hp.hypergradient(problem, hp.LocalGradient(), *arguments)
    for i in range(n):
        pull = second["map"][i].T @ (second["map"][i] @ np.asarray(at[i]) - second["target"][i])
        expected = direct.value[i] - first["coupling"][i] @ np.linalg.solve(first["hessian"][i], pull)
        np.testing.assert_allclose(local.value[i], expected, rtol=1e-8)
    assert direct.rounds == local.rounds == 0
