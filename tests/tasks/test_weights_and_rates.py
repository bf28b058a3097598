"""Tasks with weights of examples and with L2 rates: costs, constants and wrong labels by NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from linear import example_gradients, softmax
from wide import float64  # noqa: F401  (a fixture)

from hyperpush.errors import InvalidInput
from hyperpush.tasks import rates
from hyperpush.tasks.cleaning import Labeled, Slotted, accuracy, cleaning, constants, corrupt_labels, unit_rows

D, C, M, L2 = 3, 4, 6, 0.05


def weights_problem():
    """The costs of the task with weights, whatever the data."""
    one = Labeled(np.zeros((1, 1, D)), np.zeros((1, 1), int))
    return cleaning(one, one, C, np.zeros((1, 1), int), L2).problem


def rates_problem():
    """The costs of the task with rates, whatever the data."""
    one = np.zeros((1, 1, D)), np.zeros((1, 1))
    return rates.l2_rates(one, one).problem


def weighted(generator):
    """Examples with weights, and a classifier: inputs, labels, λ, W."""
    inputs = unit_rows(generator.normal(size=(M, D - 1)))
    return inputs, generator.integers(0, C, M), generator.normal(size=M), generator.normal(size=(D, C))


@pytest.mark.usefixtures("float64")
def test_derivatives_of_weighted_costs():
    inputs, labels, hyper, params = weighted(np.random.default_rng(0))
    problem, weights = weights_problem(), 1 / (1 + np.exp(-hyper))
    batch = Slotted(jnp.asarray(inputs), jnp.asarray(labels), jnp.arange(M))
    each, vector = example_gradients(inputs, labels, params), np.random.default_rng(1).normal(size=(D, C))
    p = softmax(inputs @ params)
    along = inputs @ vector
    bends = np.einsum("md,mc->mdc", inputs, p * along - p * (p * along).sum(1, keepdims=True))
    at = jnp.asarray(params), jnp.asarray(hyper), batch
    slope = np.einsum("m,mdc->dc", weights, each) / M + L2 * params
    np.testing.assert_allclose(problem.inner_gradient(*at), slope, atol=1e-12)
    hessian = np.einsum("m,mdc->dc", weights, bends) / M + L2 * vector
    np.testing.assert_allclose(problem.hessian_product(*at, jnp.asarray(vector)), hessian, atol=1e-12)
    jacobian = weights * (1 - weights) * np.einsum("mdc,dc->m", each, vector) / M
    np.testing.assert_allclose(problem.jacobian_product(*at, jnp.asarray(vector)), jacobian, atol=1e-12)
    outer = problem.outer_gradients(*at[:2], Labeled(*batch[:2]))
    np.testing.assert_allclose(outer[0], each.mean(0), atol=1e-12)
    np.testing.assert_array_equal(outer[1], 0)
    chosen = np.mean(np.argmax(inputs @ params, 1) == labels)
    assert accuracy(at[0], Labeled(*batch[:2])) == pytest.approx(chosen)


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
    """(∂²_yy g, ∂²_xy g, ∂_y f) of one example as arrays, for flat params."""
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
    by = generator.choice([0, 1], (many, 1))  # moves of one kind at a time are the largest per unit
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


def test_corrupt_labels():
    labels = np.random.default_rng(0).integers(0, 10, (4, 2000))
    given, wrong = corrupt_labels(labels, 0.3, range(10), 1)
    np.testing.assert_array_equal(given != labels, wrong)
    assert abs(wrong.mean() - 0.3) < 4 * np.sqrt(0.21 / labels.size)
    # Every other label is as likely as any.
    counts = np.bincount((given - labels)[wrong] % 10, minlength=10)
    assert counts[0] == 0
    np.testing.assert_allclose(counts[1:], wrong.sum() / 9, atol=5 * np.sqrt(wrong.sum() / 9))
    given, wrong = corrupt_labels(labels, 0.3, (0, 3, 9), 1)
    assert set(given[wrong]) == {0, 3, 9}
    np.testing.assert_array_equal(given != labels, wrong)
    for share, into, message in ((1.2, range(10), "share"), (0.5, (3,), "into")):
        with pytest.raises(InvalidInput, match=message):
            corrupt_labels(labels, share, into, 0)
