"""MobileNet-v2: inverted residual blocks with linear bottlenecks. Sandler, Howard, Zhu, Zhmoginov, Chen 2018."""

from math import sqrt
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from hyperpush.base.errors import InvalidInput
from hyperpush_papers.common.models.layers import Layer, affine, convolution, depthwise


class Stage(NamedTuple):
    """`blocks` blocks that widen by `expansion` and end with `channels`; the first of them has the stride."""

    expansion: int
    channels: int
    blocks: int
    stride: int


# Table 2 of the paper.
STAGES = (
    Stage(1, 16, 1, 1),
    Stage(6, 24, 2, 2),
    Stage(6, 32, 3, 2),
    Stage(6, 64, 4, 2),
    Stage(6, 96, 3, 1),
    Stage(6, 160, 3, 2),
    Stage(6, 320, 1, 1),
)


class MobileNetV2(eqx.Module):
    """Color images to logits: a 3×3 convolution, the stages, a 1×1 convolution, the mean over places, a dense layer.

    The paper's strides divide the side of an image by 32: 32×32 pixels end as one place, as with TorchVision's model.
    Group normalization (Wu, He 2018) in `groups` groups of channels takes the place of batch norm. Batch norm makes an
    example's cost depend on its batch, and clients would have to agree on its running means. The number of parameters
    is that of the published model.
    """

    classes: int = eqx.field(static=True)
    stem: int = eqx.field(static=True, default=32)
    stem_stride: int = eqx.field(static=True, default=2)
    stages: tuple[Stage, ...] = eqx.field(
        static=True, converter=lambda stages: tuple(Stage(*own) for own in stages), default=STAGES
    )
    last: int = eqx.field(static=True, default=1280)
    groups: int = eqx.field(static=True, default=8)

    def _blocks(self) -> list[tuple[int, int, int, int]]:
        """Channels that come in, inside and out, and the stride, of every block."""
        found, entering = [], self.stem
        for expansion, channels, blocks, stride in self.stages:
            for i in range(blocks):
                found.append((entering, expansion * entering, channels, stride if i == 0 else 1))
                entering = channels
        return found

    def init(self, key: PRNGKeyArray) -> PyTree:
        """Convolutions N(0, 2/(outputs that an input reaches)), scales 1, the dense layer N(0, 0.01²)."""
        keys = iter(jax.random.split(key, 3 * len(self._blocks()) + 3))

        def normal(shape: tuple[int, ...], reached: int) -> Float[Array, "..."]:
            return sqrt(2 / reached) * jax.random.normal(next(keys), shape)

        def with_scale(weight: Array) -> Layer:
            width = weight.shape[-1:]
            return {"weight": weight, "scale": jnp.ones(width), "move": jnp.zeros(width)}

        params: dict[str, PyTree] = {"stem": with_scale(normal((3, 3, 3, self.stem), 9 * self.stem))}
        for i, (entering, inside, leaving, _) in enumerate(self._blocks(), start=1):
            block = {"widen": with_scale(normal((entering, inside), inside))} if inside != entering else {}
            block["places"] = with_scale(normal((3, 3, inside), 9))
            block["narrow"] = with_scale(normal((inside, leaving), leaving))
            params[f"block{i}"] = block
        leaving = self._blocks()[-1][2] if self.stages else self.stem
        params["last"] = with_scale(normal((leaving, self.last), self.last))
        head = 0.01 * jax.random.normal(next(keys), (self.last, self.classes))
        return {**params, "dense": {"weight": head, "bias": jnp.zeros(self.classes)}}

    def apply(self, params: PyTree, images: Float[Array, "b height width colors"]) -> Float[Array, "b classes"]:
        """The logits of each image."""
        if images.shape[3] != 3:
            raise InvalidInput("images", images.shape, "[any number, height, width, 3]")
        x = self._activate(params["stem"], convolution(_only(params["stem"]), images, self.stem_stride, 1))
        for i, (entering, _, leaving, stride) in enumerate(self._blocks(), start=1):
            block, inside = params[f"block{i}"], x
            if "widen" in block:
                inside = self._activate(block["widen"], affine(_only(block["widen"]), inside))
            places = block["places"]
            inside = self._activate(places, depthwise(places["weight"], inside, stride, 1))
            inside = self._normalize(block["narrow"], affine(_only(block["narrow"]), inside))
            x = x + inside if stride == 1 and entering == leaving else inside
        x = self._activate(params["last"], affine(_only(params["last"]), x))
        return affine(params["dense"], jnp.mean(x, axis=(1, 2)))

    def _normalize(self, layer: Layer, x: Float[Array, "b h w c"]) -> Float[Array, "b h w c"]:
        b, h, w, c = x.shape
        grouped = x.reshape(b, h, w, self.groups, c // self.groups)
        mean = jnp.mean(grouped, axis=(1, 2, 4), keepdims=True)
        spread = jnp.mean(jnp.square(grouped - mean), axis=(1, 2, 4), keepdims=True)
        x = ((grouped - mean) * jax.lax.rsqrt(spread + 1e-5)).reshape(x.shape)
        return x * layer["scale"] + layer["move"]

    def _activate(self, layer: Layer, x: Float[Array, "b h w c"]) -> Float[Array, "b h w c"]:
        """Normalized, then ReLU6."""
        return jax.nn.relu6(self._normalize(layer, x))


def _only(layer: Layer) -> Layer:
    """The weights: what follows moves, so biases are left out."""
    return {"weight": layer["weight"]}
