"""Convolutional classifiers of small images."""

import equinox as eqx
import jax
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from hyperpush.base.errors import InvalidInput
from hyperpush_papers.common.models.layers import convolution, dense, dense_shapes, draw_layers, max_pool


class CNN(eqx.Module):
    """A convolution, ReLU and 2×2 max-pooling for each of `channels`, then dense layers.

    Images are squares of `size` pixels a side, gray, or with `colors` above 1 as the last axis. Convolutions are
    `kernel` pixels wide and do not pad; pooling leaves out the last row and column of odd ones. A dense layer with ReLU
    for each of `hidden` precedes the one that gives `classes` logits.
    """

    channels: tuple[int, ...] = eqx.field(static=True, converter=tuple)
    hidden: tuple[int, ...] = eqx.field(static=True, converter=tuple)
    classes: int = eqx.field(static=True)
    size: int = eqx.field(static=True, default=28)
    kernel: int = eqx.field(static=True, default=5)
    colors: int = eqx.field(static=True, default=1)

    def __check_init__(self):
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
        depths = (self.colors, *self.channels)
        convolutions = {f"conv{i}": (self.kernel, self.kernel, *depths[i - 1 : i + 1]) for i in range(1, len(depths))}
        units = (self._side() ** 2 * depths[-1], *self.hidden, self.classes)
        return draw_layers(key, convolutions | dense_shapes(units))

    def apply(self, params: PyTree, images: Float[Array, "b height width *colors"]) -> Float[Array, "b classes"]:
        """The logits of each image."""
        shape = (self.size, self.size) if self.colors == 1 else (self.size, self.size, self.colors)
        if images.shape[1:] != shape:
            raise InvalidInput("images", images.shape, f"[any number, {', '.join(map(str, shape))}]")
        x = images[..., None] if self.colors == 1 else images
        for i in range(1, len(self.channels) + 1):
            # ReLU of the largest is the largest ReLU, on a quarter of the numbers.
            x = jax.nn.relu(max_pool(convolution(params[f"conv{i}"], x)))
        return dense(params, x.reshape(x.shape[0], -1), len(self.hidden) + 1)


# Terashita and Hara, "Decentralized hyper-gradient computation over time-varying directed networks".
EMNIST = CNN(channels=(32, 64), hidden=(2048,), classes=62)  # personalization: 2,278,334 parameters
INFLUENCE = CNN(channels=(20, 20), hidden=(), classes=10)  # influence of single examples: 13,750 parameters
