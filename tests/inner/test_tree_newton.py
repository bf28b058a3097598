"""TreeNewton solves the inner problem, ends with identical params on all clients, and reports failures."""

import jax.numpy as jnp
import numpy as np
import pytest
from inner_problems import data, derivatives, logistic, solution, square, task_of
from wide import float64  # noqa: F401

import hyperpush as hp

NETWORK = hp.networks.RandomDirected(6)
FORMS = {"packed": hp.TreeNewton(), "products": hp.TreeNewton(packed=0)}
forms = pytest.mark.parametrize("method", FORMS.values(), ids=FORMS)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("loss", [square, logistic])
@forms
def test_it_ends_at_the_solution_of_any_condition(loss, method):
    for condition in (10, 1e4):
        given = data(condition)
        found = hp.train(task_of(loss, *given), method, NETWORK, key=0)
        assert (found.status.converged, found.status.reason) == (True, "tolerance")
        assert np.ptp(found.params, axis=0).max() == 0
        expected = solution(loss, *given)
        away = np.linalg.norm(found.params[0] - expected) / np.linalg.norm(expected)
        assert found.status.error is not None
        assert away <= found.status.error <= 1e-6


@forms
def test_in_float32_too(method):
    given = data(100.0)
    found = hp.train(task_of(logistic, *given), method, NETWORK, key=0)
    expected = solution(logistic, *given)
    assert found.status.converged
    assert np.linalg.norm(found.params[0] - expected) <= 2e-4 * np.linalg.norm(expected)


@pytest.mark.usefixtures("float64")
@forms
def test_threads_end_with_the_same_params_for_the_same_messages(method):
    task = task_of(logistic, *data(100.0))
    one, other = (hp.train(task, method, NETWORK, key=0, engine=engine) for engine in (hp.Simulate(), hp.Threads()))
    np.testing.assert_allclose(other.params, one.params, rtol=1e-6)
    assert np.ptp(other.params, axis=0).max() == 0
    assert (other.status.reason, other.costs.rounds, other.costs.floats) == (
        one.status.reason,
        one.costs.rounds,
        one.costs.floats,
    )


@pytest.mark.usefixtures("float64")
@forms
def test_clients_that_start_apart_meet(method):
    given = data(100.0)
    starts = hp.per_client(jnp.asarray(np.random.default_rng(1).normal(size=(6, 8))))
    task = task_of(square, *given).replace(_params=starts)
    found = hp.train(task, method, NETWORK, key=0)
    np.testing.assert_allclose(found.params, [solution(square, *given)] * 6, rtol=1e-5)


def double_well(x, hyper, rows):
    """Return a cost with a saddle at zero, between minima at ±1 along the first direction."""
    return jnp.sum((x[0] ** 2 - 1) ** 2 / 4 + jnp.sum(x[1:] ** 2)) + 0 * rows


@pytest.mark.usefixtures("float64")
@forms
def test_it_leaves_a_saddle_where_the_gradient_is_zero(method):
    rows = jnp.ones((6, 2))
    task = hp.Task(inner=double_well, outer=double_well, params=jnp.zeros(3), hypers=0.0, train=rows, validation=rows)
    found = hp.train(task, method, NETWORK, key=0)
    assert found.status.converged
    np.testing.assert_allclose(np.abs(found.params), [[1, 0, 0]] * 6, atol=1e-5)


@pytest.mark.usefixtures("float64")
@forms
def test_a_direction_without_curvature_is_ill_posed(method):
    rows, labels, log_rates = data(10.0)
    rows[..., -1] = 0
    found = hp.train(task_of(square, rows, labels, log_rates - 100), method, NETWORK, key=0)
    assert (found.status.converged, found.status.reason) == (False, "ill-posed")


@pytest.mark.usefixtures("float64")
def test_a_direction_that_no_gradient_has_is_not_overlooked():
    """No gradient has a part along the eigenvalue 1e-9, so only the probe detects it."""
    rows, labels, _ = data(2.0)
    draw = np.random.default_rng(5)
    weak = np.linalg.qr(draw.normal(size=(8, 8)))[0][:, 0]
    rows = rows - (rows @ weak)[..., None] * weak
    task = task_of(square, rows, labels, np.full((6, 8), np.log(1e-9)))
    found = hp.train(task, FORMS["products"], NETWORK, key=0)
    gradient, hessian = derivatives(square, np.asarray(found.params[0]), rows, labels, np.full((6, 8), np.log(1e-9)))
    newton = np.linalg.norm(np.linalg.solve(hessian, gradient)) / np.linalg.norm(found.params[0])
    assert found.status.converged is False or newton <= 1e-6


def test_private_tasks_and_distrust_are_refused():
    task = task_of(square, *data())
    private = task.private(noise=hp.privacy.Gaussian(1.0), clip=1.0)
    with pytest.raises(hp.InvalidInput, match="TreeNewton on a private task"):
        hp.train(private, hp.TreeNewton(), NETWORK, key=0)
    with pytest.raises(hp.InvalidInput, match="TreeNewton among peers that lose messages"):
        hp.train(task, hp.TreeNewton(), NETWORK, key=0, engine=hp.Threads(faults=hp.Faults(loss=0.1)))
