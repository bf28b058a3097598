"""`Automatic` chooses the documented estimator for each network, and its result names the choice."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from systems import inner, outer, system

import hyperpush as hp
from hyperpush.engines.run_checks import check_repairable

NETWORK = hp.networks.RandomDirected(6)


@pytest.mark.parametrize(
    ("options", "name", "why"),
    [
        ({}, "TreeCG", "members that trust each other"),
        ({"trust": False}, "TrackedHGP", "distrust"),
        ({"batch_size": 1}, "TrackedHGP", "mini-batches"),
    ],
)
def test_it_takes_what_the_situation_allows_and_says_why(options, name, why):
    method, task = hp.Automatic(**options), system("like").task
    assert type(method.bind(NETWORK, None, task)).__name__ == name
    assert method.choice(hp.Simulate(), task).startswith(f"{name}: ")
    assert why in method.choice(hp.Simulate(), task)


LOSSY = hp.Faults(loss=0.2, delay=1)
ASYNCHRONOUS = hp.Peers("0", {str(client): None if client else "127.0.0.1:1" for client in range(6)}, tls=False,
                        mode="asynchronous")  # fmt: skip


@pytest.mark.parametrize("engine", [hp.Simulate(faults=LOSSY), hp.Threads(faults=LOSSY), ASYNCHRONOUS], ids=type)
@pytest.mark.parametrize("options", [{}, {"trust": False}, {"batch_size": 1}, {"tolerance": 1e-2}], ids=repr)
@pytest.mark.parametrize("private", [False, True])
def test_what_it_takes_runs_where_messages_get_lost(engine, options, private):
    task, method = hp.tasks.logistic(6, seed=0), hp.Automatic(**options)
    if private:
        task = task.private(noise=hp.privacy.Gaussian(1.0), clip=1.0, curvature=1.0, coupling=1.0)
    check_repairable(method.bind(NETWORK, engine, task).program(task.problem), True, trees=not engine.no_tree)
    if options == {} and not private and engine.no_tree:
        assert method.choice(engine, task) == f"TrackedHGP: {engine.no_tree}"
        with pytest.raises(hp.InvalidInput, match=rf"TreeCG among {engine.no_tree}'; allowed: TrackedHGP"):
            hp.PDBO(hp.SGP(1, 0.1), hp.TreeCG(), hp.optimizer("sgd", learning_rate=0.1), steps=1).bind(NETWORK, engine)


@pytest.mark.parametrize(("kind", "converged"), [("like", True), ("ill-conditioned", False)])
@pytest.mark.long
def test_where_nobody_can_vote_the_error_is_judged_at_the_end(kind, converged):
    """In float64: the 1e-5 of the default are far above rounding, so the verdict does not depend on the last bits."""
    with jax.enable_x64(True):
        found, error = without_votes(kind)
    assert (found.status.converged, found.status.reason) == (converged, "tolerance" if converged else "limit")
    assert error < (np.inf if found.status.error is None else found.status.error)
    assert not converged or found.status.error is not None


@pytest.mark.long
def test_where_nobody_can_vote_the_judged_error_holds_in_float32():
    """Rounding alone decides here whether the estimate is small enough; it must not be below the true error."""
    found, error = without_votes("like")
    assert error < 1e-4  # what float32 can promise
    assert found.status.error is not None
    assert error < found.status.error


def without_votes(kind):
    """Return a hypergradient from lossy links, and its true error."""
    problem = system(kind)
    found = hp.hypergradient(problem.task, hp.TrackedHGP(200), NETWORK, key=0, engine=hp.Simulate(faults=LOSSY))
    return found, problem.error(found.value)


@pytest.mark.long
def test_results_carry_the_choice():
    problem = system("like")
    found = hp.hypergradient(problem.task, hp.Automatic(), NETWORK, key=0)
    assert found.status.chosen.startswith("TreeCG: ")
    assert "by TreeCG" in repr(found)
    same = hp.hypergradient(problem.task, hp.TreeCG(), NETWORK, key=0)
    np.testing.assert_array_equal(found.value, same.value)
    assert same.status.chosen == ""
    method = hp.PDBO(hp.SGP(1, 0.1), hp.Automatic(), hp.optimizer("sgd", learning_rate=0.1), steps=1)
    assert "by TreeCG" in repr(hp.solve(problem.task, method, NETWORK, key=0))


@pytest.mark.parametrize("rate", [pytest.param(0.0, marks=pytest.mark.long), 100.0])
@pytest.mark.long
def test_on_a_private_task_the_step_follows_from_the_bound_of_curvature_and_the_penalty(rate):
    """The bounds clip nothing. With a penalty of 100, steps of 1/4 would grow 24-fold each time."""
    problem = system("like")
    curvature = float(np.abs(np.linalg.eigvalsh(problem.hessians)).max())
    noise = {"noise": hp.privacy.Gaussian(1e-9), "clip": 1e3, "coupling": 1e3}
    costs = {"inner": lambda *at: inner(*at)[None], "outer": lambda *at: outer(*at)[None]}  # the loss of one example
    task = problem.task.replace(**costs, penalty=lambda x, hyper: rate / 2 * jnp.sum(x**2))
    truth = problem._replace(hessians=problem.hessians + rate * np.eye(problem.sources.shape[1])).hypergradients()
    found = hp.hypergradient(task.private(curvature=curvature, **noise), hp.Automatic(), NETWORK, key=0).value
    error = np.linalg.norm(found - truth) / np.linalg.norm(truth)
    assert error < 0.1, error
    move = hp.optimizer("sgd", learning_rate=1e-6)
    method = hp.PDBO(hp.SGP(1, 1e-9), hp.Automatic(), move, steps=3)  # later outer steps reuse the settings
    assert np.all(np.isfinite(hp.solve(task.private(curvature=curvature, **noise), method, NETWORK, key=0).hypers))
    with pytest.raises(hp.InvalidInput, match=r"task\.private\.curvature"):
        hp.hypergradient(task.private(**noise), hp.Automatic(), NETWORK, key=0)
