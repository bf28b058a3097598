"""Several problems at once give the results of separate runs, for the messages of one."""

import jax.numpy as jnp
import numpy as np
import pytest
from wide import float64  # noqa: F401

import hyperpush as hp

TASK = hp.tasks.quadratic(4, seed=0)
NETWORK, METHODS = hp.networks.RandomDirected(4), [hp.TreeNewton(), hp.TreeNewton(packed=0)]


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("method", METHODS, ids=["packed", "products"])
@pytest.mark.parametrize("engine", [hp.Simulate(), hp.Threads()], ids=lambda engine: type(engine).__name__)
def test_each_run_ends_where_it_ends_alone(method, engine):
    task = hp.tasks.logistic(4, seed=0)
    hypers = [factor * task.hypers for factor in (1.0, 0.2, 5.0)]
    found = hp.train(task, method, NETWORK, key=0, runs=hypers, engine=engine)
    alone = [hp.train(task.at(hypers=each), method, NETWORK, key=0, engine=engine) for each in hypers]
    assert all(status.converged for status in found.statuses)
    for run, each in enumerate(alone):
        size = np.linalg.norm(each.params)
        assert np.linalg.norm(found.params[run] - each.params) <= 1e-8 * size
        assert found.errors[run] == pytest.approx(each.status.error, rel=1e-2, abs=1e-9)
        np.testing.assert_array_equal(found.task_of(run).hypers, hypers[run])
        judged = found.statuses[run]
        assert judged.residual is not None
        assert judged.residual <= 1e-6
        assert judged.disagreement == pytest.approx(each.status.disagreement, abs=1e-12)
    # All runs wait for the slowest one and share its rounds.
    assert found.costs.rounds == max(each.costs.rounds for each in alone)
    assert found.costs.floats <= 3 * max(each.costs.floats for each in alone)


@pytest.mark.usefixtures("float64")
def test_each_run_is_judged_as_it_would_be_alone():
    """Clients alone have the cost ½(x − a)² + λx²/2, so each step multiplies the distance by 1 − η(1 + λ)."""
    task = hp.Task(
        inner=lambda x, hyper, a: (x - a) ** 2 / 2 + hyper * x**2 / 2,
        outer=lambda x, hyper, a: (x - a) ** 2,
        params=0.0,
        hypers=0.0,
        train=jnp.ones((4, 1)),
        validation=jnp.ones((4, 1)),
    )
    rates = [0.0, 1.0, 3.0]
    found = hp.train(task, hp.LocalSGD(20, 0.2), NETWORK, key=0, runs=[jnp.full(4, rate) for rate in rates])
    for rate, status in zip(rates, found.statuses, strict=True):
        left = (1 - 0.2 * (1 + rate)) ** 20
        assert status.residual == pytest.approx(left / (1 - left), rel=1e-3, abs=1e-12)
    assert [status.converged for status in found.statuses] == [None, True, True]
    assert found.statuses[0].reason.startswith("near the solution")


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    "method",
    # Tracked runs share no messages and follow one another.
    [hp.TreeNewton(), pytest.param(hp.TrackedSGP(tolerance=1e-9), marks=pytest.mark.long)],
    ids=["TreeNewton", "TrackedSGP"],
)
def test_retraining_without_a_record_is_the_closed_form(method):
    draw = np.random.default_rng(0)
    rows, targets = draw.normal(size=(4, 6, 3)), draw.normal(size=(4, 6))

    def loss(x, hyper, batch):
        return 0.5 * (batch[0] @ x - batch[1]) ** 2

    pair = jnp.asarray(rows), jnp.asarray(targets)
    task = hp.Task(inner=loss, outer=loss, params=jnp.zeros(3), hypers=0.0, train=pair, validation=pair)
    left_out = [hp.influence.without(task), hp.influence.without(task, [(1, 2)]), hp.influence.without(task, [], [3])]
    found = hp.influence.retrain(task, method, NETWORK, left_out, key=0)
    assert found.status.converged
    for weights, costs in zip(left_out, found.losses, strict=True):
        kept = np.asarray(weights.examples) * np.asarray(weights.client)[:, None]
        flat, wanted = rows.reshape(-1, 3), targets.reshape(-1)
        x = np.linalg.solve((flat.T * kept.ravel()) @ flat, flat.T @ (kept.ravel() * wanted))
        np.testing.assert_allclose(costs, (0.5 * (rows @ x - targets) ** 2).mean(1), rtol=1e-7)


def test_what_does_not_fit_is_refused():
    for given, name in (([], "runs"), ([jnp.zeros(3)], r"runs\[0\]"), (TASK.hypers, "runs")):
        with pytest.raises(hp.InvalidInput, match=name):
            hp.train(TASK, hp.TreeNewton(), NETWORK, key=0, runs=given)
    with pytest.raises(hp.InvalidInput, match="averages by 'tree'"):
        hp.train(TASK, hp.SGP(3, 0.1), NETWORK, key=0, runs=[TASK.hypers])
    with pytest.raises(hp.InvalidInput, match="seeds"):
        hp.train(TASK, hp.TreeNewton(), NETWORK, key=0, runs=[TASK.hypers], seeds=2)


class Shorter(hp.extend.InnerSolver):
    """Solver that returns fewer params than it was given."""

    info = hp.LocalSGD.info

    def program(self, problem):
        cut = lambda state, ctx: hp.extend.InnerState(state.params[:2], state.hyper)  # noqa: E731
        return hp.programs.Local(cut)


def test_params_of_another_shape_than_the_tasks_are_refused():
    with pytest.raises(hp.InvalidInput, match=r"Shorter, which returns params of shape \(4, 2\)"):
        hp.train(TASK, Shorter(), NETWORK, key=0)
    with pytest.raises(hp.InvalidInput, match=r"Shorter, which returns params of shape \(4, 2\)"):
        hp.train(TASK, Shorter(), NETWORK, key=0, runs=[TASK.hypers])


def test_losses_that_are_nan_are_refused_with_client_and_example():
    def loss(x, hyper, label):
        return jnp.where(label == 3, jnp.nan, (x - label) ** 2)

    labels = jnp.tile(jnp.arange(4.0), (4, 1))
    task = hp.Task(inner=loss, outer=loss, params=0.0, hypers=0.0, train=labels, validation=labels)
    with pytest.raises(hp.InvalidInput, match="client 0, example 3"):
        hp.train(task, hp.TreeNewton(), NETWORK, key=0, runs=[task.hypers])
    with pytest.raises(hp.InvalidInput, match="client 0, example 3"):
        hp.tune(task, hp.SGP(2, 0.1), NETWORK, key=0, over={"step_size": [0.1]}, on="validation")
