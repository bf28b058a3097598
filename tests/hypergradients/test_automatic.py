"""What Automatic takes where, and that the result says so."""

import numpy as np
import pytest
from systems import system

import hyperpush as hp

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
    assert method.choice(task).startswith(f"{name}: ")
    assert why in method.choice(task)


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
