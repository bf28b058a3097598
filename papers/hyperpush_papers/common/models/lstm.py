"""A model of text: the next character from those before it."""

from math import sqrt

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Integer, PRNGKeyArray, PyTree

from hyperpush_papers.common.models.layers import Layer, affine, draw_layer


class LSTM(eqx.Module):
    """An embedding of characters, `layers` layers of `hidden` LSTM cells, and a dense layer after the last character.

    Each layer computes c_t = f·c_{t−1} + i·g and h_t = o·tanh(c_t). The gates are i, f, o = sigmoid and g = tanh of
    W(x_t, h_{t−1}) + b. Hochreiter and Schmidhuber 1997. There is one bias per gate; PyTorch adds two up.
    """

    classes: int = eqx.field(static=True)
    embedding: int = eqx.field(static=True, default=8)
    hidden: int = eqx.field(static=True, default=256)
    layers: int = eqx.field(static=True, default=2)

    def init(self, key: PRNGKeyArray) -> PyTree:
        """Embeddings N(0, 1), the rest uniform in ±1/√hidden, as PyTorch draws them by default."""
        keys = jax.random.split(key, self.layers + 2)
        params: dict[str, PyTree] = {"embedding": jax.random.normal(keys[0], (self.classes, self.embedding))}
        bound = 1 / sqrt(self.hidden)
        for i in range(1, self.layers + 1):
            entering = (self.embedding if i == 1 else self.hidden) + self.hidden
            weight, bias = jax.random.split(keys[i])
            params[f"lstm{i}"] = {
                "weight": jax.random.uniform(weight, (entering, 4 * self.hidden), minval=-bound, maxval=bound),
                "bias": jax.random.uniform(bias, (4 * self.hidden,), minval=-bound, maxval=bound),
            }
        return {**params, "dense": draw_layer(keys[-1], (self.hidden, self.classes))}

    def apply(self, params: PyTree, text: Integer[Array, "b length"]) -> Float[Array, "b classes"]:
        """The logits of the character after each text; characters are numbers from 0 to classes − 1."""
        # A product instead of a lookup, whose derivative would be a slow scatter.
        x = jax.nn.one_hot(text.T, self.classes, dtype=params["embedding"].dtype) @ params["embedding"]
        for i in range(1, self.layers + 1):
            x = _layer(params[f"lstm{i}"], x)
        return affine(params["dense"], x[-1])


SHAKESPEARE = LSTM(classes=80)  # Marfoq, Neglia, Bellet, Kameni, Vidal 2021: 817,872 parameters


def _layer(layer: Layer, x: Float[Array, "t b i"]) -> Float[Array, "t b h"]:
    hidden = layer["weight"].shape[1] // 4
    own, again = layer["weight"][:-hidden], layer["weight"][-hidden:]

    def step(before, entering):
        h, c = before
        i, f, g, o = jnp.split(entering + h @ again, 4, axis=-1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    # What enters is known for the whole text: one large product instead of one per character.
    entering = x @ own + layer["bias"]
    start = jnp.zeros((x.shape[1], hidden), entering.dtype)
    return jax.lax.scan(step, (start, start), entering)[1]
