"""Every inner solver compared with the same iteration in NumPy, and with known solutions."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from wide import float64  # noqa: F401

import hyperpush as hp
from hyperpush.engines import keys
from hyperpush.engines.simulate import evaluate
from hyperpush.hypergradients import oracles
from hyperpush.inner.base import InnerState
from hyperpush.tasks.quadratic import quadratic

pytestmark = pytest.mark.usefixtures("float64")
KEY = jax.random.key(2)


def train(solver, network, made):
    """Return the params after training, and what clients observed of their links."""
    found: Any = hp.train(made, solver, network, key=KEY)
    return SimpleNamespace(params=found.params, links=found.task.point.links)


def gradients(x, made):
    """Return the gradients of the quadratics: ∇f_i = A_i x_i − b_i + C_iᵀ λ_i."""
    first, hypers = jax.tree.map(np.asarray, (made.train, made.hypers))
    return (
        np.einsum("nij,nj->ni", first["hessian"], x)
        - first["linear"]
        + np.einsum("nhd,nh->nd", first["coupling"], hypers)
    )


def matrices(network, steps, weights):
    return [np.asarray(hp.networks.matrix(network, keys.network_key(KEY), t, weights)) for t in range(steps)]


@pytest.mark.parametrize("order", ["gradient-first", "gradient-after"])
def test_sgp_is_its_equation(order):
    made, network = quadratic(5, 0), hp.networks.RandomDirected(5)
    z, mass = np.asarray(made.params), np.ones(5)
    schedule = [0.1] * 20 + [0.01] * 10
    for push, rate in zip(matrices(network, 30, "push"), schedule, strict=True):
        move = -rate * gradients(z / mass[:, None], made)
        z = push @ (z + move) if order == "gradient-first" else push @ z + move
        mass = push @ mass
    found = train(hp.SGP(30, hp.schedule("milestones", 0.1, (20,)), order), network, made)
    np.testing.assert_allclose(found.params, z / mass[:, None], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("order", ["gradient-first", "gradient-after"])
def test_dsgd_is_its_equation(order):
    made, network = quadratic(6, 1), hp.networks.Ring(6)
    x = np.asarray(made.params)
    for mix in matrices(network, 25, "gossip"):
        move = -0.1 * gradients(x, made)
        x = mix @ (x + move) if order == "gradient-first" else mix @ x + move
    found = train(hp.DSGD(25, 0.1, order), network, made)
    np.testing.assert_allclose(found.params, x, rtol=1e-10, atol=1e-12)


def test_sgp_with_falling_rate_reaches_the_consensus_solution():
    made, network = quadratic(5, 3), hp.networks.RandomDirected(5)
    solver = hp.SGP(20_000, lambda step: 0.1 / (1 + 0.05 * step))
    found = train(solver, network, made).params
    truth = oracles.minimize(made.problem, made.params, made.hypers, made.data)
    assert np.abs(truth).max() > 0.1
    np.testing.assert_allclose(found, truth, atol=2e-3)


def test_sgp_on_the_complete_network_is_a_fedavg_step():
    made, network = quadratic(4, 2), hp.networks.FullyConnected(4)
    pushed = train(hp.SGP(10, 0.1), network, made).params
    averaged = train(hp.FedAvg(10, 0.1, weighted=False), network, made).params
    np.testing.assert_allclose(pushed, averaged, rtol=1e-12)
    assert np.abs(pushed).max() > 0.1


def test_alone_is_gradient_descent_without_messages():
    made, network = quadratic(3, 4), hp.networks.FullyConnected(3)
    x = np.asarray(made.params)
    for _ in range(15):
        x = x - 0.1 * gradients(x, made)
    np.testing.assert_allclose(train(hp.LocalSGD(15, 0.1), network, made).params, x, rtol=1e-10)


def test_alone_every_client_finds_a_step_for_its_own_curvature():
    """Curvatures of 1 and 0.3 times 1e-3, 1 and 1e3: no common step size would do."""
    bends = jnp.array([1.0, 0.3])
    task = hp.Task(
        inner=lambda x, hyper, scale: scale[0] * jnp.sum(bends * (x - 2) ** 2) / 2, outer=lambda x, hyper, a: x @ x,
        params=jnp.zeros(2), hypers=0.0, train=jnp.array([[1e-3], [1.0], [1e3]]), validation=jnp.zeros((3, 1)),
    )  # fmt: skip
    found = hp.train(task, hp.LocalSGD(100), hp.networks.FullyConnected(3), key=KEY)
    np.testing.assert_allclose(found.params, 2, rtol=1e-10)
    assert (found.status.converged, found.costs.hessian_products) == (True, 10)


@pytest.mark.parametrize("solver", [hp.SGP(40, 0.05), hp.DSGD(40, 0.05)], ids=["sgp", "dsgd"])
def test_what_clients_observe_is_what_the_network_did(solver):
    made, network = quadratic(4, 0), hp.networks.RandomUndirected(4)
    links = train(solver, network, made).links
    assert train(solver.with_options(observe=False), network, made).links is None
    pushes = matrices(network, 40, solver.weights)
    mass, masses = np.ones(4), []
    for push in pushes:
        masses.append(mass)
        mass = push @ mass
    np.testing.assert_allclose(links.sent, np.mean(pushes, axis=0).T, rtol=1e-10)
    np.testing.assert_allclose(links.heard, np.mean([push > 0 for push in pushes], axis=0), rtol=1e-10)
    np.testing.assert_allclose(links.mass, np.mean(masses, axis=0), rtol=1e-10)
    np.testing.assert_array_equal(links.rounds, 40)


def mean_task(owned):
    """Return a task with f(x) = mean ½(x − example)², for which an epoch of SGD has a simple closed form."""

    def losses(params, hyper, batch):
        return 0.5 * (params - batch) ** 2

    return hp.Task(inner=losses, outer=losses, params=0.0, hypers=0.0, train=owned, validation=owned)


def test_fedavg_along_a_tree_solves_the_inner_problem_on_directed_links():
    """FedAvg is gradient descent on the mean cost, so it ends at its solution; SGP at this step size does not."""
    made, ring = quadratic(5, 0), hp.networks.DirectedRing(5)
    first, hypers = jax.tree.map(np.asarray, (made.train, made.hypers))
    linear = first["linear"] - np.einsum("nhd,nh->nd", first["coupling"], hypers)
    solution = np.linalg.solve(first["hessian"].mean(0), linear.mean(0))
    found = hp.train(made, hp.FedAvg(200, 0.3, averaging="tree"), ring, key=KEY)
    np.testing.assert_allclose(found.params, np.broadcast_to(solution, found.params.shape), atol=1e-9)
    assert np.abs(np.asarray(train(hp.SGP(1000, 0.3), ring, made).params) - solution).max() > 1e-3
    # In a ring, every client except the last one sends a partial sum, and every client except one the mean. Messages
    # hold the params and the weight.
    assert found.costs.rounds == 200 * 8
    assert found.costs.floats <= 200 * 2 * (4 + 1)


@pytest.mark.parametrize("averaging", ["server", "tree"])
def test_fedavg_weighs_clients_by_their_data(averaging):
    task = mean_task([np.arange(3.0), np.arange(10.0, 11.0)])
    found = train(hp.FedAvg(1, 1.0, averaging=averaging), hp.networks.FullyConnected(2), task).params
    # A full step moves to each client's mean, 1 or 10; the clients have weights 3 and 1.
    np.testing.assert_allclose(found, [3.25, 3.25])


def test_a_ragged_epoch_visits_every_example_once():
    """With batches of one example and rates 1/(k+1), the iterate is the mean of the examples used so far."""
    owned = [np.array([5.0, 1.0, 3.0]), np.array([2.0, 4.0, 6.0, 8.0, 10.0]), np.array([7.0])]
    solver = hp.FedAvg(1, lambda step: 1 / (step + 1), batch_size=1, weighted=False)
    found = train(solver, hp.networks.FullyConnected(3), mean_task(owned)).params
    np.testing.assert_allclose(found, np.full(3, np.mean([np.mean(own) for own in owned])))


def test_mini_batch_gradients_are_unbiased_on_ragged_data():
    task = mean_task([np.arange(3.0), np.arange(20.0, 27.0)])
    start, data, network = InnerState(task.params, task.hypers), task.data, hp.networks.FullyConnected(2)

    def once(key):
        program = hp.LocalSGD(1, 1.0, batch_size=2).program(task.problem)
        return evaluate(program, network, start, data, key)[0].params

    draws = jax.jit(jax.vmap(once))(jax.random.split(KEY, 4000))
    spread = draws.std(0)
    assert np.all(spread > 0.1)
    assert np.all(np.abs(draws.mean(0) - np.array([1.0, 23.0])) < 4.5 * spread / np.sqrt(4000))
    # Two of seven examples are drawn without replacement: their mean has variance σ²/2 · (7 − 2)/(7 − 1).
    np.testing.assert_allclose(spread[1] ** 2, 4 / 2 * 5 / 6, rtol=0.1)


def test_a_rate_that_diverges_is_reported_with_its_round():
    made, network = quadratic(3, 0), hp.networks.RandomDirected(3)
    with pytest.raises(hp.Diverged, match=r"SGP diverged \(NaN or infinity\) in round") as caught:
        train(hp.SGP(3000, 30.0), network, made)
    finite = train(hp.SGP(caught.value.round - 1, 30.0), network, made)
    assert np.all(np.isfinite(finite.params))
