"""What Automatic takes where, and that the result says so."""

import numpy as np
import pytest
from systems import system

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
    assert type(method.on(NETWORK, None, task)).__name__ == name
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
    check_repairable(method.on(NETWORK, engine, task).program(task.problem), True, trees=not engine.no_tree)
    if options == {} and not private and engine.no_tree:
        assert method.choice(engine, task) == f"TrackedHGP: {engine.no_tree}"
        with pytest.raises(hp.InvalidInput, match=rf"TreeCG among {engine.no_tree}'; allowed: TrackedHGP"):
            hp.PDBO(hp.SGP(1, 0.1), hp.TreeCG(), hp.optimizer("sgd", learning_rate=0.1), steps=1).on(NETWORK, engine)


def test_where_nobody_can_vote_the_error_is_judged_at_the_end():
    for kind, converged in (("like", True), ("ill-conditioned", False)):
        problem = system(kind)
        found = hp.hypergradient(problem.task, hp.TrackedHGP(200), NETWORK, key=0, engine=hp.Simulate(faults=LOSSY))
        assert found.status.error is not None
        assert problem.error(found.value) < found.status.error
        assert (found.status.converged, found.status.reason) == (converged, "tolerance" if converged else "limit")


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


def test_on_a_private_task_the_bound_of_curvature_gives_the_step_size():
    noise = {"noise": hp.privacy.Gaussian(1.0), "clip": 1.0, "coupling": 1.0}
    task = hp.tasks.logistic(6, seed=0)
    taken = hp.Automatic().on(NETWORK, None, task.private(curvature=4.0, **noise))
    assert isinstance(taken, hp.TrackedHGP)
    assert taken.step_size == 0.25
    with pytest.raises(hp.InvalidInput, match=r"task\.private\.curvature"):
        hp.hypergradient(task.private(**noise), hp.Automatic(), NETWORK, key=0)
