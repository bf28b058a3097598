"""Convolutional classifiers of small grey images."""

from math import prod, sqrt

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from hyperpush.checks import whole
from hyperpush.errors import InvalidInput

Layer = dict[str, Array]


class CNN(eqx.Module):
    """A convolution, ReLU and 2×2 max-pooling for each of `channels`, then dense layers.

    Images are squares of `size` pixels a side. Convolutions are `kernel` pixels wide and do not pad; pooling leaves out
    the last row and column of odd ones. A dense layer with ReLU for each of `hidden` precedes the one that gives
    `classes` logits.
    """

    channels: tuple[int, ...] = eqx.field(static=True, converter=tuple)
    hidden: tuple[int, ...] = eqx.field(static=True, converter=tuple)
    classes: int = eqx.field(static=True)
    size: int = eqx.field(static=True, default=28)
    kernel: int = eqx.field(static=True, default=5)

    def __check_init__(self):
        for name in ("channels", "hidden"):
            for width in getattr(self, name):
                whole(f"CNN.{name}", width, least=1)
        for name in ("classes", "size", "kernel"):
            whole(f"CNN.{name}", getattr(self, name), least=1)
        if self._side() < 1:
            layers = f"{len(self.channels)} convolutions of {self.kernel} pixels, each followed by pooling"
            raise InvalidInput("CNN.size", self.size, f"enough pixels for {layers}")

    def _side(self) -> int:
        """Of the square that the last pooling leaves."""
        side = self.size
        for _ in self.channels:
            side = (side - self.kernel + 1) // 2
        return side

    def init(self, key: PRNGKeyArray) -> PyTree:
        """Weights and biases uniform in ±1/√(inputs of a unit), as PyTorch draws them by default."""
        window = (self.kernel, self.kernel)
        depths = (1, *self.channels)
        units = (self._side() ** 2 * depths[-1], *self.hidden, self.classes)
        shapes = {f"conv{i}": (*window, *depths[i - 1 : i + 1]) for i in range(1, len(depths))}
        shapes |= {f"dense{i}": units[i - 1 : i + 1] for i in range(1, len(units))}
        keys = jax.random.split(key, len(shapes))
        return {name: _drawn(own, shape) for own, (name, shape) in zip(keys, shapes.items(), strict=True)}

    def apply(self, params: PyTree, images: Float[Array, "b height width"]) -> Float[Array, "b classes"]:
        """The logits of each image."""
        if images.shape[1:] != (self.size, self.size):
            raise InvalidInput("images", images.shape, f"[any number, {self.size}, {self.size}]")
        x = images[..., None]
        for i in range(1, len(self.channels) + 1):
            # ReLU of the largest is the largest ReLU, on a quarter of the numbers.
            x = jax.nn.relu(_largest(_convolution(params[f"conv{i}"], x)))
        x = x.reshape(x.shape[0], -1)
        for i in range(1, len(self.hidden) + 1):
            x = jax.nn.relu(_affine(params[f"dense{i}"], x))
        return _affine(params[f"dense{len(self.hidden) + 1}"], x)


# Terashita and Hara, "Decentralized hyper-gradient computation over time-varying directed networks".
EMNIST = CNN(channels=(32, 64), hidden=(2048,), classes=62)  # personalisation: 2,278,334 parameters
INFLUENCE = CNN(channels=(20, 20), hidden=(), classes=10)  # influence of single examples: 13,750 parameters


def _drawn(key: PRNGKeyArray, shape: tuple[int, ...]) -> Layer:
    bound = 1 / sqrt(prod(shape[:-1]))
    first, second = jax.random.split(key)
    weight = jax.random.uniform(first, shape, minval=-bound, maxval=bound)
    return {"weight": weight, "bias": jax.random.uniform(second, shape[-1:], minval=-bound, maxval=bound)}


def _affine(layer: Layer, x: Float[Array, "... i"]) -> Float[Array, "... o"]:
    weight = layer["weight"]
    return x @ weight.reshape(-1, weight.shape[-1]) + layer["bias"]


def _convolution(layer: Layer, x: Float[Array, "b h w c"]) -> Float[Array, "b i j o"]:
    """A product of matrices with the window around every place as a row.

    Several times faster on CPUs than XLA's own convolution, whose second derivatives in loops are slow.
    """
    k = layer["weight"].shape[0]
    height, width = x.shape[1] - k + 1, x.shape[2] - k + 1
    shifted = [x[:, i : i + height, j : j + width] for i in range(k) for j in range(k)]
    return _affine(layer, jnp.concatenate(shifted, axis=-1))


def _largest(x: Float[Array, "b h w c"]) -> Float[Array, "b i j c"]:
    """The largest number in each 2×2 window."""
    b, h, w, c = x.shape
    x = x[:, : h // 2 * 2, : w // 2 * 2]
    return jnp.max(x.reshape(b, h // 2, 2, w // 2, 2, c), axis=(2, 4))
