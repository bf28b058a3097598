"""Arguments that cannot work are refused by name before anything is computed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hyperpush as hp
from hyperpush.problems.logistic import logistic
from hyperpush.problems.quadratic import quadratic


def estimate(problem=None, params=None, hypers=None, inner=None, outer=None, clients=3):
    made = logistic(3, 0, examples=8)
    return hp.hypergradient(
        problem or made.problem,
        hp.HGP(2, 1, 1.0),
        hp.networks.FullyConnected(clients),
        made.params if params is None else params,
        made.hypers if hypers is None else hypers,
        made.inner_data if inner is None else inner,
        made.outer_data if outer is None else outer,
        jax.random.key(0),
    )


def test_the_setting_itself_is_fine():
    assert np.all(np.isfinite(estimate().value))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hypers": jnp.zeros((4, 6))}, r"hypers: got \(4, 6\); allowed: 3 clients"),
        ({"params": jnp.zeros((2, 6))}, r"params: got \(2, 6\)"),
        ({"clients": 5}, "allowed: 5 clients"),
        ({"inner": (jnp.full((3, 8, 6), jnp.nan), jnp.zeros((3, 8)))}, r"inner_data\[0\].*NaN"),
        ({"outer": (jnp.zeros((3, 8, 6)), jnp.zeros((3, 8)).at[1, 2].set(jnp.inf))}, r"outer_data\[1\].*clients \[1\]"),
        ({"hypers": jnp.zeros((3, 6), jnp.int32)}, "hypers.*int32.*floating"),
        ({"params": jnp.zeros((3, 5))}, r"problem\.inner.*fails with"),
        (
            {"inner": hp.ragged([(np.zeros((2, 6)), np.zeros(2))] * 3)},
            r"problem\.inner.*fails with.*a Batch",
        ),
        ({"inner": (jnp.zeros((3, 0, 6)), jnp.zeros((3, 0)))}, "inner_data: got '0 examples"),
        ({"problem": hp.Problem(lambda x, h, b: x, lambda x, h, b: jnp.sum(x))}, r"problem\.inner.*scalar"),
        ({"problem": hp.Problem(lambda x, h, b: jnp.sum(x), lambda x, h, b: x * 2)}, r"problem\.outer.*scalar"),
        (
            {"inner": hp.Ragged((jnp.zeros((3, 8, 6)), jnp.zeros((3, 8))), jnp.array([8, 0, 2]))},
            r"inner_data: got 'no examples at clients \[1\]'",
        ),
    ],
)
def test_bad_arguments_name_the_field(changes, message):
    with pytest.raises(hp.InvalidInput, match=message):
        estimate(**changes)


def test_ragged_refuses_what_it_cannot_stack():
    with pytest.raises(hp.InvalidInput, match=r"data of client 1.*0 examples"):
        hp.ragged([np.zeros((3, 2)), np.zeros((0, 2))])
    with pytest.raises(hp.InvalidInput, match="data of client 1"):
        hp.ragged([{"a": np.zeros(3)}, {"b": np.zeros(3)}])
    with pytest.raises(hp.InvalidInput, match=r"data of client 0.*same number"):
        hp.ragged([(np.zeros(3), np.zeros(4))])


def test_l2_adds_to_gradient_and_hessian():
    made = logistic(2, 0, examples=8)
    with_l2 = made.problem.with_l2(0.3)
    x, hyper, batch = made.params[0] + 0.5, made.hypers[0], jax.tree.map(lambda a: a[0], made.inner_data)
    vector = jnp.arange(6.0)
    more = with_l2.inner_gradient(x, hyper, batch) - made.problem.inner_gradient(x, hyper, batch)
    np.testing.assert_allclose(more, 0.3 * x, rtol=1e-5)
    product = with_l2.products(x, hyper, batch, vector)[0] - made.problem.products(x, hyper, batch, vector)[0]
    np.testing.assert_allclose(product, 0.3 * vector, rtol=1e-4, atol=1e-5)
    with pytest.raises(hp.InvalidInput, match="l2"):
        made.problem.with_l2(-1.0)


def test_products_are_those_of_the_matrices():
    """½xᵀAx − bᵀx + λᵀCx has the Hessian A and the cross derivative C."""
    made = quadratic(2, 0)
    batch = jax.tree.map(lambda a: a[1], made.inner_data)
    vector = jnp.arange(1.0, 5.0)
    arguments = (made.params[1], made.hypers[1], batch, vector)
    image, mixed = np.asarray(batch["hessian"]) @ vector, np.asarray(batch["coupling"]) @ vector
    np.testing.assert_allclose(made.problem.hessian_product(*arguments), image, rtol=1e-5)
    np.testing.assert_allclose(made.problem.jacobian_product(*arguments), mixed, rtol=1e-5)
    both = made.problem.products(*arguments)
    np.testing.assert_allclose(both[0], image, rtol=1e-5)
    np.testing.assert_allclose(both[1], mixed, rtol=1e-5)
