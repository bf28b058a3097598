"""The study of private bilevel optimization: its problem checked by differences and samples, then a small run."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hyperpush.privacy import ASSUMPTION
from hyperpush.spec.config import load_config
from hyperpush.spec.execute import execute
from hyperpush.spec.studies import experiments
from hyperpush_papers.private.streams import SIZE, constants_of, errors, problem_of, samples, slope, stream

SMALL = (
    "rounds=500",
    "seeds=8",
    "trials=4000",
    "attacked=2",
    "epsilon=40",
    "step=0.2",
    "step_exponent=0.8",
    "noise_exponent=0.7",
    "cases=['strongly convex']",
)


@pytest.mark.parametrize("case", ["strongly convex", "convex", "non-convex"])
def test_costs_gradients_and_minimizers_agree(case):
    made, h = stream(case, 5, 1), 1e-5
    x = np.array([0.3, -0.8])
    differences = [(made.cost(x + h * unit) - made.cost(x - h * unit)) / (2 * h) for unit in np.eye(SIZE)]
    np.testing.assert_allclose(made.gradient(x), differences, atol=1e-8)
    # Compare the inner solution and the costs with the implemented problem, on rows that equal their own means.
    problem = problem_of(made)
    y, clients = made.inner_solution(x), np.arange(5)
    rows = [[{"client": clients[i : i + 1], "sample": mean[i : i + 1]} for i in clients] for mean in made[4:6]]
    slopes = [problem.inner_gradient(jnp.asarray(y), jnp.asarray(x), row) for row in rows[0]]
    np.testing.assert_allclose(np.mean(slopes, 0), 0, atol=1e-6)
    costs = [problem.outer_cost(jnp.asarray(y), jnp.asarray(x), row) for row in rows[1]]
    np.testing.assert_allclose(np.mean(costs), made.cost(x), rtol=1e-5)
    if case != "non-convex":
        np.testing.assert_allclose(made.gradient(made.minimum()), 0, atol=1e-12)
    else:  # there are several stationary points: the slope of ∇F changes its sign
        bend = [np.diff([made.gradient(np.array([a + d, 0.0]))[0] for d in (-h, h)])[0] for a in np.linspace(0, 2, 50)]
        assert min(bend) < 0 < max(bend)
    if case == "convex":  # the second direction of x has no effect
        np.testing.assert_allclose(made.cost(x + np.array([0.0, 5.0])), made.cost(x))


@pytest.mark.parametrize("case", ["strongly convex", "non-convex"])
def test_constants_hold_for_samples(case):
    made = stream(case, 5, 0)
    c = constants_of(made, 0.5)
    problem, data = problem_of(made), samples(made, 20, 0.5, jax.random.key(0))
    for x in (np.zeros(SIZE), made.minimum() if case == "strongly convex" else made.aim.mean(0)):
        y = made.inner_solution(x) if np.any(x) else np.zeros(SIZE)

        def norms(y, x, first, second):
            y, x = jnp.asarray(y, jnp.float32), jnp.asarray(x, jnp.float32)
            along_y, along_x = problem.outer_gradients(y, x, second)
            return [jnp.linalg.norm(v) for v in (problem.inner_gradient(y, x, first), along_y, along_x)]

        one = jax.tree.map(lambda leaf: leaf[:, :, None], (data.train, data.outer))
        each = jax.vmap(jax.vmap(lambda first, second, y=y, x=x: jnp.stack(norms(y, x, first, second))))(*one)
        assert np.all(np.asarray(each).max((0, 1)) < [c.C_y, c.C_b, c.C_x])
        assert np.linalg.norm(made.adjoint(x)) < c.R
    assert np.all(np.linalg.eigvalsh(made.hessian) <= c.C_H + 1e-12)
    assert np.all(np.linalg.svd(made.coupling)[1] <= c.C_J + 1e-12)


def test_errors_and_slopes_by_hand():
    made = stream("strongly convex", 5, 0)
    hypers = made.minimum() + np.array([3.0, 4.0]) * np.ones((2, 7, 5, 1))
    np.testing.assert_allclose(errors(made, "strongly convex", hypers), 25 * np.ones((2, 7)))
    convex = stream("convex", 5, 0)
    falling = convex.minimum() + np.array([1.0, 0.0]) * np.array([2.0, 1.0, 0.0])[:, None, None]
    unit = convex.cost(convex.minimum() + np.array([1.0, 0.0])) - convex.cost(convex.minimum())
    np.testing.assert_allclose(errors(convex, "convex", falling), unit * np.array([4, 5 / 2, 5 / 3]), atol=1e-12)
    rounds = np.arange(1, 1000)
    assert slope(rounds, np.where(rounds < 99, 1.0, 7.0) * rounds**-0.4) == pytest.approx(-0.4)


@pytest.mark.long
def test_the_study_in_small(tmp_path, capsys):
    experiment, config = load_config("private", SMALL, experiments())
    result, _ = execute(experiment, config, tmp_path / "run")
    assert result["assumes"] == ASSUMPTION
    assert 0 < result["epsilon_audited"] <= result["epsilon_attacked_rounds"]
    assert result["epsilon_attacked_rounds"] < result["epsilon_claimed"] <= result["epsilon_limit"]
    assert result["epsilon_limit"] == pytest.approx(40, rel=1e-6)
    spent = np.array(result["epsilon_by_round"]["epsilon"])
    assert spent[0] == 0  # the first message has used no sample
    assert np.all(np.diff(spent) >= 0)
    falling, constant, none = result["curves"]
    assert result["curve"]["distance"] == falling["distance"]
    assert result["curve"]["T"][0] == 100
    assert result["curve"]["T"][-1] == 500
    assert none["distance"][-1] < falling["distance"][-1] < constant["distance"][-1]
    assert falling["distance"][-1] < 0.7 * falling["distance"][0]
    assert constant["distance"][-1] > constant["distance"][0]
    assert "assumes ideal real-valued noise" in capsys.readouterr().err
