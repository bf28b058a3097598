"""Layers that are fast on CPUs when many clients are computed at once, derivatives included."""

from collections.abc import Mapping, Sequence
from math import prod, sqrt

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

Layer = dict[str, Array]


def draw_layer(key: PRNGKeyArray, shape: tuple[int, ...]) -> Layer:
    """Weights and biases uniform in ±1/√(inputs of a unit), as PyTorch draws them by default."""
    bound = 1 / sqrt(prod(shape[:-1]))
    first, second = jax.random.split(key)
    weight = jax.random.uniform(first, shape, minval=-bound, maxval=bound)
    return {"weight": weight, "bias": jax.random.uniform(second, shape[-1:], minval=-bound, maxval=bound)}


def affine(layer: Layer, x: Float[Array, "... i"]) -> Float[Array, "... o"]:
    """Weights times inputs, plus biases if there are any."""
    weight = layer["weight"]
    product = x @ weight.reshape(-1, weight.shape[-1])
    return product + layer["bias"] if "bias" in layer else product


def draw_layers(key: PRNGKeyArray, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Layer]:
    """A layer of each of these shapes, by name."""
    keys = jax.random.split(key, len(shapes))
    return {name: draw_layer(own, shape) for own, (name, shape) in zip(keys, shapes.items(), strict=True)}


def dense_shapes(units: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """Shapes of dense layers between layers of these sizes: `dense1`, `dense2`, …."""
    return {f"dense{i}": tuple(units[i - 1 : i + 1]) for i in range(1, len(units))}


def dense(layers: Mapping[str, Layer], x: Float[Array, "b i"], count: int) -> Float[Array, "b o"]:
    """`count` dense layers with ReLU between them."""
    for i in range(1, count):
        x = jax.nn.relu(affine(layers[f"dense{i}"], x))
    return affine(layers[f"dense{count}"], x)


def windows(x: Float[Array, "b h w c"], kernel: int, stride: int, pad: int) -> list[Float[Array, "b i j c"]]:
    """Return the values at each place of a `kernel`×`kernel` window, for all positions of the window."""
    x = jnp.pad(x, ((0, 0), (pad, pad), (pad, pad), (0, 0))) if pad else x
    height, width = ((side - kernel) // stride * stride + 1 for side in x.shape[1:3])
    return [x[:, i : i + height : stride, j : j + width : stride] for i in range(kernel) for j in range(kernel)]


def convolution(layer: Layer, x: Float[Array, "b h w c"], stride: int = 1, pad: int = 0) -> Float[Array, "b i j o"]:
    """A product of matrices with the window around every place as a row.

    On CPUs a round of SGP takes a fifth less than with XLA's own convolution, lowered as the engines do it. Second
    derivatives take as long, and batches of 16 a tenth more (docs/results/benchmarks.md).
    """
    return affine(layer, jnp.concatenate(windows(x, layer["weight"].shape[0], stride, pad), axis=-1))


def depthwise(
    weight: Float[Array, "k k c"], x: Float[Array, "b h w c"], stride: int = 1, pad: int = 0
) -> Float[Array, "b i j c"]:
    """A convolution of each channel with its own window: a sum of shifted products."""
    k, _, channels = weight.shape
    parts = zip(windows(x, k, stride, pad), weight.reshape(k * k, channels), strict=True)
    return sum((part * own for part, own in parts), jnp.zeros((), x.dtype))


def max_pool(x: Float[Array, "b h w c"]) -> Float[Array, "b i j c"]:
    """The largest number in each 2×2 window; the last row and column of odd ones are left out."""
    b, h, w, c = x.shape
    x = x[:, : h // 2 * 2, : w // 2 * 2]
    return jnp.max(x.reshape(b, h // 2, 2, w // 2, 2, c), axis=(2, 4))
