"""Dense classifiers compared with NumPy."""

from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hyperpush.base.errors import InvalidInput
from hyperpush_papers.common.models.dense import MLP


def size(params):
    return sum(leaf.size for leaf in jax.tree.leaves(params))


@pytest.mark.parametrize("hidden", [(), (5, 3)], ids=["logistic regression", "two hidden layers"])
def test_logits_are_those_of_numpy(hidden):
    model = MLP(inputs=6, classes=4, hidden=hidden)
    params = model.init(jax.random.key(0))
    inputs = np.random.default_rng(1).normal(size=(7, 2, 3)).astype(np.float32)
    x = inputs.reshape(7, 6)
    for i in range(1, len(hidden) + 2):
        x = x @ np.asarray(params[f"dense{i}"]["weight"]) + np.asarray(params[f"dense{i}"]["bias"])
        x = np.maximum(x, 0) if i <= len(hidden) else x
    assert np.std(x) > 1e-2
    np.testing.assert_allclose(model.apply(params, jnp.asarray(inputs)), x, rtol=1e-4, atol=1e-5)
    widths = (6, *hidden, 4)
    assert size(params) == sum((a + 1) * b for a, b in pairwise(widths))


def test_inputs_of_another_size_are_refused():
    model = MLP(inputs=6, classes=2)
    with pytest.raises(InvalidInput, match=r"inputs: got \(2, 5\); allowed: .*6 numbers each"):
        model.apply(model.init(jax.random.key(0)), jnp.zeros((2, 5)))
