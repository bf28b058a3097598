"""PDBO on quadratics, whose outer optimum NumPy knows."""

import jax
import numpy as np
import optax
import pytest
from closed_forms import mean_outer_cost
from wide import float64  # noqa: F401

import hyperpush as hp
from hyperpush.problems.quadratic import quadratic

pytestmark = pytest.mark.usefixtures("float64")


def optimum(made):
    """The hypers that minimise F̄: x* is affine in them, so F̄ is a quadratic with one stationary point."""
    first, second = jax.tree.map(np.asarray, (made.inner_data, made.outer_data))
    n, h, d = first["coupling"].shape
    inverse = np.linalg.inv(first["hessian"].sum(0))
    slope = -inverse @ first["coupling"].reshape(n * h, d).T  # x* = slope·λ + offset, λ flattened
    offset = inverse @ first["linear"].sum(0)
    rows = np.concatenate([second["map"] @ slope, np.eye(n * h).reshape(n, h, n * h)], axis=1)
    right = np.concatenate([second["target"] - second["map"] @ offset, second["hyper_target"]], axis=1)
    return np.linalg.lstsq(rows.reshape(-1, n * h), right.ravel(), rcond=None)[0].reshape(n, h)


def solve(made, network, inner, estimator, outer_steps, **options):
    return hp.solve(
        made.problem,
        network,
        inner=inner,
        hypergradient=estimator,
        outer=optax.sgd(0.5),
        outer_steps=outer_steps,
        params=made.params,
        hypers=made.hypers,
        inner_data=made.inner_data,
        outer_data=made.outer_data,
        key=jax.random.key(0),
        **options,
    )


@pytest.mark.parametrize("restart", [True, False], ids=["restart", "warm"])
def test_outer_steps_reach_the_optimum(restart):
    made, network = quadratic(3, 1), hp.networks.RandomDirected(3)
    inner = hp.SGP(400, hp.milestones(0.2, (100, 200, 300)))
    solution = solve(made, network, inner, hp.HGP(60, 20, 0.3), 60, restart=restart)
    best = optimum(made)
    start = np.linalg.norm(made.hypers - best)
    assert np.linalg.norm(solution.hypers - best) < 0.02 * start
    costs = np.asarray(solution.outer_costs).mean(1)
    assert costs.shape == (61,)
    first, second = jax.tree.map(np.asarray, (made.inner_data, made.outer_data))
    assert costs[0] == pytest.approx(mean_outer_cost(np.asarray(made.hypers), first, second), rel=0.02)
    assert costs[-1] == pytest.approx(mean_outer_cost(np.asarray(solution.hypers), first, second), rel=0.02)
    assert solution.rounds == 60 * (400 + 60 * 20) + 400
    gradients = np.linalg.norm(solution.hypergradients, axis=(1, 2))
    assert gradients[-1] < 0.02 * gradients[0]


def test_zero_outer_steps_only_train():
    made = quadratic(3, 1)
    solution = solve(made, hp.networks.FullyConnected(3), hp.SGP(20, 0.1), hp.HGP(1, 1, 0.1), 0)
    np.testing.assert_array_equal(solution.hypers, made.hypers)
    assert np.abs(solution.params).max() > 0.1
    assert solution.rounds == 20
    assert solution.outer_costs.shape == (1, 3)


def test_estimators_that_reverse_links_work_inside():
    made, network = quadratic(3, 1), hp.networks.RandomDirected(3)
    inner = hp.SGP(400, hp.milestones(0.2, (200, 300)), observe=True)
    solution = solve(made, network, inner, hp.VRHGP(200, 0.02), 30)
    best = optimum(made)
    assert np.linalg.norm(solution.hypers - best) < 0.1 * np.linalg.norm(made.hypers - best)
