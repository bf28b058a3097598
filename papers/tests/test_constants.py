"""L2 rates compared with NumPy, and the privacy constants of tasks with example weights and with L2 rates."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from wide import float64  # noqa: F401  (a fixture)

from hyperpush.tasks.cleaning import Labeled, Slotted, cleaning, unit_rows
from hyperpush_papers.tune import rates
from hyperpush_papers.tune.weights import constants

D, C, L2 = 3, 4, 0.05


def weights_problem():
    """Return the costs of the task with weights; the data do not matter here."""
    one = Labeled(np.zeros((1, 1, D)), np.zeros((1, 1), int))
    return cleaning(one, one, C, np.zeros((1, 1), int), L2).problem


def rates_problem():
    """Return the costs of the task with rates; the data do not matter here."""
    one = np.zeros((1, 1, D)), np.zeros((1, 1))
    return rates.l2_rates(one, one).problem


@pytest.mark.usefixtures("float64")
def test_rates_are_exponentials_of_small_hypers_and_cap():
    small, large = jnp.asarray([-12.0, -9.0]), jnp.asarray([40.0])
    np.testing.assert_allclose(rates.rates(small), np.exp(small), rtol=1e-3)
    np.testing.assert_allclose(rates.rates(large), rates.TOP)
    generator = np.random.default_rng(0)
    inputs, labels = generator.normal(size=(9, 4)), generator.integers(0, 2, 9).astype(float)
    params, hyper = 0.1 * generator.normal(size=4), np.full(4, -8.0)
    scores = inputs @ params
    plain = np.mean(np.log1p(np.exp(scores)) - labels * scores) + 0.5 * np.exp(-8.0) * np.sum(params**2)
    batch = jnp.asarray(inputs), jnp.asarray(labels)
    given = rates_problem().inner_cost(jnp.asarray(params), jnp.asarray(hyper), batch)
    assert float(given) == pytest.approx(plain, rel=1e-6)


def operators(inner, outer, params, hyper):
    """Return (∂²_yy g, ∂²_xy g, ∂_y f) of one example as arrays, for flat params."""
    hessian, mixed = jax.jacfwd(jax.grad(inner), argnums=(0, 1))(params, hyper)
    return hessian, mixed, jax.grad(outer)(params)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("which", ["weights", "rates"])
def test_constants_hold_for_single_examples_and_are_not_far_off(which):
    generator = np.random.default_rng(0)
    if which == "weights":
        bounds, problem, size, hypers = constants(L2)(1.0, 1.0), weights_problem(), D * C, 1

        shape = (D, C)
    else:
        bounds, problem, size, hypers = rates.constants(1.0, 1.0), rates_problem(), D, D

        shape = (D,)

    def row(inputs, label):
        if which == "weights":
            return Slotted(inputs[None], label[None], jnp.zeros(1, int))
        return inputs[None], (label % 2).astype(float)[None]

    def shaped(flat):
        return flat.reshape(shape)

    @jax.jit
    @jax.vmap
    def at(inputs, label, params, hyper):
        batch = row(inputs, label)
        return operators(
            lambda w, h: problem.inner_cost(shaped(w), h, batch),
            lambda w: problem.outer_cost(shaped(w), hyper, batch),
            params,
            hyper,
        )

    many = 4000
    inputs = unit_rows(generator.normal(size=(many, D - 1)))
    labels, spread = jnp.asarray(generator.integers(0, C, many)), generator.choice([0.1, 1, 3, 10], (many, 1))
    y, x = spread * generator.normal(size=(many, size)), spread * generator.normal(size=(many, hypers))
    near = 10.0 ** generator.uniform(-3, 0, (many, 1))
    by = generator.choice([0, 1], (many, 1))  # changes of one variable at a time are the largest per unit
    dy, dx = by * near * generator.normal(size=y.shape), (1 - by) * near * generator.normal(size=x.shape)
    first, second = (at(jnp.asarray(inputs), labels, *map(jnp.asarray, p)) for p in ((y, x), (y + dy, x + dx)))

    def norms(matrices):
        return np.linalg.norm(np.asarray(matrices), 2, axis=(1, 2))

    moved = np.linalg.norm(dy, axis=1) + np.linalg.norm(dx, axis=1)
    change = [np.asarray(b) - np.asarray(a) for a, b in zip(first, second, strict=True)]
    seen = {
        "C_H": norms(first[0]),
        "C_J": norms(first[1]),
        "L_H": norms(change[0]) / moved,
        "L_J": norms(change[1]) / moved,
        "L_b": np.linalg.norm(change[2], axis=1) / moved,
    }
    for name, values in seen.items():
        bound = getattr(bounds, name)
        assert values.max() <= bound * (1 + 1e-9), name
        assert values.max() > bound / 12, name
