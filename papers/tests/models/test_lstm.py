"""LSTM cells against NumPy, one character at a time."""

import jax
import jax.numpy as jnp
import numpy as np

from hyperpush_papers.common.models.lstm import LSTM, SHAKESPEARE


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def test_the_model_of_shakespeare_has_its_number_of_parameters():
    params = jax.eval_shape(SHAKESPEARE.init, jax.random.key(0))
    cells = [4 * 256 * (entering + 256 + 1) for entering in (8, 256)]
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == 80 * 8 + sum(cells) + (256 + 1) * 80 == 817_872


def test_logits_are_those_of_numpy():
    model, rng = LSTM(classes=5, embedding=3, hidden=4, layers=2), np.random.default_rng(0)
    params = jax.tree.map(
        lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), jnp.float32), model.init(jax.random.key(0))
    )
    text = rng.integers(0, 5, (3, 6))
    weights = jax.tree.map(np.asarray, params)
    expected = []
    for line in text:
        h, c, x = np.zeros((2, 4)), np.zeros((2, 4)), np.zeros(4)
        for character in line:
            x = weights["embedding"][character]
            for place in range(2):
                own = weights[f"lstm{place + 1}"]
                i, f, g, o = np.split(np.concatenate([x, h[place]]) @ own["weight"] + own["bias"], 4)
                c[place] = sigmoid(f) * c[place] + sigmoid(i) * np.tanh(g)
                x = h[place] = sigmoid(o) * np.tanh(c[place])
        expected.append(x @ weights["dense"]["weight"] + weights["dense"]["bias"])
    assert np.std(expected) > 0.1
    found = jax.jit(model.apply)(params, jnp.asarray(text, jnp.uint8))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
