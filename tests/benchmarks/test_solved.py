"""Trained problems: their exact hypergradients compared with NumPy, their table cells and their verdicts."""

from itertools import pairwise

import numpy as np
import pytest
from solved import NETWORKS, Solved, measure, random_cells, right_cells, verdicts
from solved_problems import away, drawn, hypergradients, relative, solve

CLIENTS = 3


def costs(made, hypers, x):
    """Return the mean inner and the mean outer cost in NumPy, with textbook losses."""
    inner, outer = (np.mean([loss(family_of(made), x, *own).mean() for own in zip(*data, strict=True)])
                    for data in (made.train, made.validation))  # fmt: skip
    return inner + np.mean(np.exp(hypers)) * (x @ x), outer


def family_of(made):
    if len(made.train) == 2:
        return "mlp"
    if made.train[3].any():
        return "regression"
    return "logistic" if made.train[2].any() else "softmax"


def loss(family, x, rows, targets, *_):
    if family == "mlp":
        return (np.tanh(rows @ x[:-4].reshape(-1, 4)) @ x[-4:] - targets) ** 2
    if family == "regression":
        return (rows[:, 0] @ x - targets[:, 0]) ** 2
    if family == "logistic":
        return np.log1p(np.exp(-(2 * targets[:, 0] - 1) * (rows[:, 0] @ x)))
    scores = rows @ x
    return np.log(np.exp(scores).sum(1)) - scores[np.arange(len(rows)), targets.argmax(1)]


@pytest.mark.parametrize("family", ["regression", "logistic", "softmax", "mlp"])
def test_dense_answers_are_those_of_numpy(family):
    made = drawn(family, CLIENTS, 2 if family == "mlp" else 6, seed=5)
    assert family_of(made) == family
    x = solve(made, made.params)
    around = np.random.default_rng(0).normal(size=(20, len(x)))
    least = costs(made, made.hypers, x)[0]
    assert all(costs(made, made.hypers, x + 1e-3 * step)[0] > least for step in around)
    slopes = [(costs(made, made.hypers, x + 1e-5 * row)[0] - costs(made, made.hypers, x - 1e-5 * row)[0]) / 2e-5
              for row in np.eye(len(x))]  # fmt: skip
    np.testing.assert_allclose(slopes, 0, atol=1e-8)
    for client, row in enumerate(np.eye(CLIENTS)):
        ends = [made._replace(hypers=made.hypers + sign * 1e-4 * row) for sign in (1, -1)]
        more, less = (costs(end, end.hypers, solve(end, x))[1] for end in ends)
        assert hypergradients(made, x)[client] == pytest.approx((more - less) / 2e-4, rel=1e-5, abs=1e-9)


def test_solutions_near_zero_are_small():
    far, near = (drawn("regression", CLIENTS, 6, 0, at_zero) for at_zero in (False, True))
    sizes = [np.linalg.norm(solve(each, each.params)) for each in (far, near)]
    assert sizes[1] < 0.2 * sizes[0]


def test_errors_are_root_mean_squares():
    assert relative([1.0, 2.0], [1.0, 1.0]) == pytest.approx(np.sqrt(0.5))
    assert away([np.array([1.0, 0.0]), np.array([0.0, 1.0])], np.array([1.0, 0.0])) == pytest.approx(1.0)


def test_random_problems_cover_families_networks_and_numbers_of_clients():
    plain = [each for each in random_cells(Solved()) if (each["variant"], each["solver"]) == ("plain", "SGP")]
    convex = [each for each in plain if each["family"] != "mlp"]
    assert len({each["seed"] for each in convex}) == len(convex) == 200
    assert {each["network"] for each in convex} == set(NETWORKS)
    assert {each["clients"] for each in convex} == {3, 8, 20, 50}
    assert len({(each["family"], each["size"]) for each in convex}) == 6
    assert len(plain) - len(convex) == 50
    places = [(each["network"], each["clients"], each["size"]) for each in random_cells(Solved())]
    changes = 1 + sum(before != after for before, after in pairwise(places))
    assert changes == len(set(places)), "cells of one program follow each other"
    assert len(list(right_cells(Solved()))) >= 200


def test_verdicts_count_what_is_silent_and_what_is_marked():
    cell = {"family": "logistic", "variant": "plain", "solver": "SGP"}
    found = [(0.2, True), (0.2, None), (0.2, False), (0.04, False), (0.021, False), (0.01, False), (0.01, True)]
    rows = [{"cell": cell, "error": error, "converged": converged} for error, converged in found]
    columns, table = verdicts([*rows, {"cell": cell, "converged": False}])
    assert len(columns) == len(table[0])
    assert table == [["convex plain SGP", 8, 3, 2, 2, 1, 1, 1, 1, 1, 1]]


@pytest.mark.long
@pytest.mark.parametrize(("solver", "right"), [("LocalSGD", False), ("TreeNewton", True)])
def test_a_cell_compares_the_status_with_the_true_error(solver, right):
    cell = {"part": "random", "network": "star", "clients": 3, "size": 6, "variant": "plain", "seed": 1}
    found = measure({**cell, "family": "regression", "solver": solver})
    assert (found["error"] < 1e-3, found["converged"]) == (right, right)
