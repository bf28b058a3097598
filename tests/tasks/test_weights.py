"""Tasks with example weights: costs and wrong labels in NumPy."""

import jax.numpy as jnp
import numpy as np
import pytest
from linear import example_gradients, softmax
from wide import float64  # noqa: F401  (a fixture)

from hyperpush.base.errors import InvalidInput
from hyperpush.tasks.cleaning import Labeled, Slotted, accuracy, cleaning, corrupt_labels, unit_rows

D, C, M, L2 = 3, 4, 6, 0.05


def weights_problem():
    """Return the costs of the task with weights; the data do not matter here."""
    one = Labeled(np.zeros((1, 1, D)), np.zeros((1, 1), int))
    return cleaning(one, one, C, np.zeros((1, 1), int), L2).problem


def weighted(generator):
    """Return examples with weights, and a classifier: inputs, labels, λ, W."""
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


def test_corrupt_labels():
    labels = np.random.default_rng(0).integers(0, 10, (4, 2000))
    given, wrong = corrupt_labels(labels, 0.3, range(10), 1)
    np.testing.assert_array_equal(given != labels, wrong)
    assert abs(wrong.mean() - 0.3) < 4 * np.sqrt(0.21 / labels.size)
    # All other labels are equally likely.
    counts = np.bincount((given - labels)[wrong] % 10, minlength=10)
    assert counts[0] == 0
    np.testing.assert_allclose(counts[1:], wrong.sum() / 9, atol=5 * np.sqrt(wrong.sum() / 9))
    given, wrong = corrupt_labels(labels, 0.3, (0, 3, 9), 1)
    assert set(given[wrong]) == {0, 3, 9}
    np.testing.assert_array_equal(given != labels, wrong)
    for share, into, message in ((1.2, range(10), "share"), (0.5, (3,), "into")):
        with pytest.raises(InvalidInput, match=message):
            corrupt_labels(labels, share, into, 0)
