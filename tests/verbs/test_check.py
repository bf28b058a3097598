"""`hp.check` on quadratics with solution, hypergradient and spectrum known to NumPy."""

from dataclasses import replace
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closed_forms import setting

import hyperpush as hp

SETTING = setting(4, 5)
RING = hp.networks.DirectedRing(4)
EIGENVALUES = np.linalg.eigvalsh(SETTING.first["hessian"].mean(0).astype(float))
GOOD = hp.HGP(60, 60, 1 / EIGENVALUES[-1])
BY_DESIGN = "it differs from what it is compared with by design."


def check(estimator: Any = GOOD, costs: Any = None, shift: Any = 0.0, **options):
    task = SETTING.task.replace(**(costs or {}))
    params = jnp.asarray(task.params, jnp.float32) + shift
    return hp.check(task.at(params=params), estimator, RING, key=0, **options)


@lru_cache
def good():
    return check()


def test_good_settings_pass():
    found = good()
    truth = SETTING.truth
    assert found.passed
    assert found.solved
    assert found.warnings == []
    assert max(found.difference_error, found.reference_error) < 1e-5
    np.testing.assert_allclose(found.solution, SETTING.task.params, rtol=1e-5)
    np.testing.assert_allclose(found.reference, truth, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(found.directions.reshape(3, -1), axis=1), 1)
    np.testing.assert_allclose(found.differences, np.einsum("dnh,nh->d", found.directions, truth), rtol=1e-5, atol=1e-6)
    assert np.all(found.uncertainties < 1e-8)
    assert found.estimate is not None
    assert (found.estimate.costs.rounds, found.estimate.costs.hessian_products) == (3600, 60)


def test_what_it_suggests():
    found, (low, *_, high) = good(), EIGENVALUES
    np.testing.assert_allclose((found.smallest, found.largest), (low, high), rtol=1e-5)
    assert found.suggested_step_size == pytest.approx(1 / high)
    assert found.suggested_steps == int(np.ceil(np.log(1e-4) / np.log(1 - low / high)))
    # Each sender keeps one half and sends the other; the second eigenvalue of P is (1 + i)/2.
    assert found.tenfold == pytest.approx(-1 / np.log10(np.sqrt(0.5)), rel=0.05)


def test_it_is_printed_on_one_screen_the_problem_first():
    text = str(good()).splitlines()
    assert text[0].endswith("on directed-ring: passed at tolerance 1e-02")
    assert [line for line in text[1:] if not line.startswith(" ")] == ["the problem", "the estimate", "what to change"]
    names = [line[2:17].strip() for line in text if line.startswith("  ")]
    assert names[:3] == ["conditioning", "inner problem", "given params"]
    assert names[names.index("direction") + 1 :][:3] == ["1", "2", "3"]
    assert "60 Hessian products, 60 Jacobian products, 1 gradients" in str(good())
    assert len(text) < 25


def test_it_says_how_the_problem_is():
    """The Jacobian of the solution is −(Σ A)⁻¹C_iᵀ; in a ring, messages reach all clients after n − 1 rounds."""
    found, (low, *_, high) = good(), EIGENVALUES
    hessians, couplings = (np.asarray(SETTING.first[name], float) for name in ("hessian", "coupling"))
    assert found.condition == pytest.approx(high / low, rel=1e-4)
    assert found.own_smallest == pytest.approx(min(np.linalg.eigvalsh(each)[0] for each in hessians), rel=1e-4)
    moves = np.einsum("nhd,knh->kd", couplings, found.directions)
    largest = np.linalg.norm(np.linalg.solve(hessians.sum(0), moves.T), axis=0).max()
    assert found.sensitivity == pytest.approx(largest, rel=1e-3)
    assert found.window == 3


def test_too_few_pushes_fail():
    found = check(hp.HGP(60, 1, GOOD.step_size))
    assert not found.passed
    assert found.solved
    assert min(found.difference_error, found.reference_error) > 0.1
    assert any(said.startswith("With pushes = 1 averages are far from the mean") for said in found.warnings)


def test_too_large_a_step_and_too_low_an_order_are_named():
    found = check(hp.HGP(60, 60, 2.5 / EIGENVALUES[-1]))
    assert not found.passed
    assert any(f"exceeds 2/λ_max = {2 / EIGENVALUES[-1]:.3g}: HGP will diverge" in said for said in found.warnings)
    found = check(hp.HGP(3, 60, GOOD.step_size))
    assert not found.passed
    needed = int(np.ceil(np.log(1e-2) / np.log(1 - EIGENVALUES[0] / EIGENVALUES[-1])))
    assert any(said.startswith("3 steps cut") and said.endswith(f"{needed}.") for said in found.warnings)


def test_params_far_from_the_solution_are_named():
    """The estimate is still taken at the solution, and passes the check."""
    shift = np.zeros((4, 4), np.float32)
    shift[1] = 2.0
    found, hessian = check(shift=shift), SETTING.first["hessian"].mean(0)
    assert found.passed
    assert found.given_distance == pytest.approx(4, rel=1e-4)
    assert found.given_spread == pytest.approx(3, rel=1e-4)
    assert found.given_gradient_norm == pytest.approx(np.linalg.norm(hessian @ np.full(4, 0.5)), rel=1e-4)
    # Client 1's outer gradient is taken at its own params; its Hessian is the same everywhere.
    second, n = SETTING.second, 4
    moved = second["map"][1].T @ second["map"][1] @ np.full(4, 2.0) / n
    change = SETTING.first["coupling"] @ np.linalg.solve(SETTING.first["hessian"].sum(0), moved)
    assert found.given_effect == pytest.approx(np.linalg.norm(change) / np.linalg.norm(SETTING.truth), rel=1e-4)
    assert any(said.startswith("The given params are 4.0e+00 from the inner solution") for said in found.warnings)


def test_wrong_derivatives_are_noticed():
    made = SETTING.task

    def outer(x, hyper, batch):
        return made.outer(jnp.concatenate([jax.lax.stop_gradient(x[:1]), x[1:]]), hyper, batch)

    found = check(costs={"outer": outer})
    assert not found.passed
    # The estimate equals automatic differentiation, while the differences are those of the intended problem.
    assert found.reference_error < 1e-5
    assert found.difference_error > 0.05
    np.testing.assert_allclose(found.differences, good().differences, rtol=1e-6)
    assert any("these derivatives are wrong" in said for said in found.warnings)


def test_an_inner_problem_without_a_solution_is_named():
    """The infimum is at infinity: gradients become arbitrarily small, but no params solve the problem."""
    found = check(costs={"inner": lambda x, h, b: jnp.sum(jax.nn.softplus(x))}, directions=1)
    assert not found.solved
    assert not found.passed
    assert found.gradient_norm < 1e-10 < 1e-3 < found.newton_step
    assert found.warnings[0].startswith("The inner problem could not be solved")
    assert f"NOT SOLVED: a Newton step still moves the params by {found.newton_step:.1e}, gradient norm" in str(found)


def test_a_saddle_is_named_where_the_gradient_vanishes():
    found = check(costs={"inner": lambda x, h, b: jnp.sum(x[1:] ** 2) - x[0] ** 2}, directions=1)
    assert found.gradient_norm < 1e-10
    assert "NOT SOLVED: a saddle, as λ_min is negative, gradient norm" in str(found)


@pytest.mark.parametrize(
    "estimator",
    [hp.hypergradients.LocalGradient(8), hp.hypergradients.ClientGradient(8), hp.hypergradients.DirectGradient()],
)
def test_other_targets_are_compared_with_what_they_are(estimator):
    found = check(estimator)
    assert found.passed
    assert max(found.difference_error, found.reference_error) < 1e-5
    assert np.linalg.norm(found.differences) > 0.1
    # The estimate differs from the hypergradient of the clients' mean cost.
    assert np.linalg.norm(found.reference - SETTING.truth) > 0.1


def test_estimators_of_the_steps_of_sgp_differ_by_design():
    found = replace(good(), estimator=hp.hypergradients.VRHGP(5, 0.1))
    # No links were observed on these random links, so it uses their means.
    by_means = hp.check(
        hp.tasks.quadratic(3, seed=0), hp.hypergradients.DirectedRB(5, 0.1), hp.networks.RandomDirected(3), key=0
    )
    assert np.isfinite(by_means.reference_error)
    assert found.warnings == ['VRHGP aims at "global, through the steps of SGP": ' + BY_DESIGN]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"directions": 0}, "directions: got 0; allowed: a whole number from 1"),
        ({"tolerance": 0.0}, "tolerance: got 0.0; allowed: a finite number above 0"),
        ({"newton_steps": 0}, "newton_steps: got 0"),
        ({"shift": np.nan}, "params: got 'NaN"),
        ({"estimator": hp.hypergradients.ExactRB(3, 0.1)}, "network: got 'directed-ring"),
    ],
)
def test_bad_arguments_name_the_field(options, message):
    with pytest.raises(hp.InvalidInput, match=message):
        check(**options)
