"""How far the inner problem is from solved: measured by the machine that hosts all, or along a tree."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from wide import float64  # noqa: F401

import hyperpush as hp
from hyperpush.hypergradients.residual import _sketch
from hyperpush.verbs.inner_residual import inner_residual

CLIENTS = 4
NETWORK = hp.networks.FullyConnected(CLIENTS)


def residual_by_numpy(task):
    """From gradients alone: those of quadratic costs are affine, so their part with x is A_i x."""
    gradients = jax.vmap(task.problem.inner_gradient)
    slope = np.asarray(gradients(task.params, task.hypers, task.train))
    part = slope - np.asarray(gradients(jnp.zeros_like(task.params), task.hypers, task.train))
    scale = max(np.linalg.norm(part.mean(0)), 0.1 * np.linalg.norm(slope, axis=1).mean())
    return np.linalg.norm(slope.mean(0)) / scale


@pytest.mark.usefixtures("float64")
def test_along_a_tree_it_is_what_one_machine_measures():
    task = hp.tasks.quadratic(CLIENTS, seed=0)
    for steps in (0, 20, 300):
        trained = hp.train(task, hp.SGP(steps=steps, step_size=0.1), NETWORK, key=0).task
        expected = residual_by_numpy(trained)
        assert inner_residual(trained, hp.HGP(1, 1, 0.1), hp.Simulate()) == pytest.approx(expected)
        for engine in (hp.Simulate(), hp.Threads()):
            status = hp.hypergradient(trained, hp.TreeCG(), NETWORK, key=0, engine=engine).status
            assert status.residual == pytest.approx(expected, abs=1e-12)
            assert (status.reason == "unsolved") == (expected > 0.1)


@pytest.mark.usefixtures("float64")
def test_solutions_tell_at_how_many_of_their_estimates_it_was_not_solved():
    """Hypers stay where they are, so that the points are those of training ever longer."""
    task, inner = hp.tasks.quadratic(CLIENTS, seed=0), hp.SGP(steps=10, step_size=0.05)
    method = hp.PDBO(inner, hp.TreeCG(), hp.optimizer("sgd", learning_rate=1e-14), steps=6, restart=False)
    status = hp.solve(task, method, NETWORK, key=0).status
    points = [hp.train(task, hp.SGP(10 * count, 0.05), NETWORK, key=0).task for count in range(1, 7)]
    expected = [residual_by_numpy(point) for point in points]
    assert expected[0] > 0.1 > expected[-1]
    assert (status.converged, status.reason, status.runs) == (False, "unsolved", 6)
    assert status.failed == sum(each > 0.1 for each in expected)
    assert status.residual == pytest.approx(max(expected))


def pulled(curvatures, pulls, params):
    """Clients with the inner costs ½ Σ_j a_j x_j² − b_iᵀx + λ_i Σ_j x_j; the mean solution is mean(b)/a at λ = 0."""

    def inner(x, hyper, batch):
        return 0.5 * jnp.sum(curvatures * x**2) - batch[0] @ x + hyper * jnp.sum(x)

    return hp.Task(
        inner=inner,
        outer=lambda x, hyper, batch: jnp.sum((x - batch[0]) ** 2),
        params=jnp.asarray(params),
        hypers=0.0,
        train=jnp.asarray(pulls)[:, None],
        validation=jnp.ones((CLIENTS, 1, len(params))),
    )


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("engine", [hp.Simulate(), hp.Threads()], ids=type)
@pytest.mark.parametrize("off", [0.03, 0.3, 1.0])
def test_params_that_are_off_in_a_weak_direction_are_unsolved(off, engine):
    """A gradient of 1e-3 times the distance looks small there; a Newton step goes all the way."""
    curvatures, solution = np.geomspace(1, 1e-3, 6), np.ones(6)
    pulls = curvatures * solution + np.random.default_rng(0).normal(size=(CLIENTS, 6))
    pulls -= pulls.mean(0) - curvatures * solution
    params = solution + off * np.linalg.norm(solution) * np.eye(6)[5]
    task = pulled(curvatures, pulls, params)
    expected = off * np.linalg.norm(solution) / np.linalg.norm(params)
    status = hp.hypergradient(task, hp.TreeCG(), NETWORK, key=0, engine=engine).status
    assert residual_by_numpy(task) < 0.01
    assert (status.reason == "unsolved") == (expected > 0.1)
    if expected > 0.1:
        assert status.residual == pytest.approx(expected)


@pytest.mark.usefixtures("float64")
def test_solved_problems_pay_nothing_for_the_newton_step():
    def rows(task):
        record = {"Newton step": lambda state, ctx: state.missing}
        return hp.hypergradient(task, hp.TreeCG(), NETWORK, key=0, record=record).history["Newton step"].shape[0]

    curvatures = np.geomspace(1, 1e-3, 6)
    solved, off = (
        pulled(curvatures, np.tile(curvatures, (CLIENTS, 1)), params) for params in (np.ones(6), 1 + np.eye(6)[5])
    )
    assert rows(solved) == 0 < rows(off)


def test_clients_that_cancel_out_at_zero_are_unsolved():
    pulls = np.concatenate([np.eye(2), -np.eye(2)]) * 100 + 0.2
    status = hp.hypergradient(pulled(np.ones(2), pulls, np.zeros(2)), hp.TreeCG(), NETWORK, key=0).status
    assert status.reason == "unsolved"
    level = hp.hypergradient(pulled(np.ones(2), pulls - 0.2, np.zeros(2)), hp.TreeCG(), NETWORK, key=0).status
    assert level.converged  # zero is the solution there


@pytest.mark.parametrize(("size", "length"), [(100, 16), (400, 50), (5000, 128)])
def test_sketches_keep_norms_and_add_up(size, length):
    one, other = jnp.asarray(np.random.default_rng(0).normal(size=(2, size)), jnp.float32)
    keys = jax.random.split(jax.random.key(0), 200)
    sketches, others, both = (jax.vmap(lambda key, v=v: _sketch(v, key))(keys) for v in (one, other, one + other))
    assert sketches.shape == (200, length)
    np.testing.assert_allclose(sketches + others, both, atol=1e-3)
    # Without bias, and with a relative variance of the squared norm of about 2/length; five standard deviations.
    squared = np.sum(sketches**2, axis=1) / np.sum(one**2)
    assert squared.mean() == pytest.approx(1, abs=5 * np.sqrt(2 / length / 200))
    assert squared.std() < 1.5 * np.sqrt(2 / length)


def test_short_vectors_travel_as_they_are():
    vector = jnp.arange(16.0)
    np.testing.assert_array_equal(_sketch(vector, jax.random.key(0)), vector)
