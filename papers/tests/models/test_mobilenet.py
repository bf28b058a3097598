"""MobileNet-v2 compared with XLA's own convolutions and NumPy's group norm."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hyperpush.base.errors import InvalidInput
from hyperpush_papers.common.models.mobilenet import MobileNetV2

TINY = MobileNetV2(classes=3, stem=4, stages=((1, 4, 1, 1), (2, 8, 2, 2)), last=8, groups=2)


def size(params):
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def test_the_published_model_has_its_number_of_parameters():
    """TorchVision's model has 3,504,872 parameters for 1,000 classes; ours follows the paper's table 2."""
    total, width = (27 + 2) * 32, 32  # weights, scale and shift of the first convolution
    for expansion, channels, blocks, _ in (
        (1, 16, 1, 1),
        (6, 24, 2, 2),
        (6, 32, 3, 2),
        (6, 64, 4, 2),
        (6, 96, 3, 1),
        (6, 160, 3, 2),
        (6, 320, 1, 1),
    ):
        for _ in range(blocks):
            inside = expansion * width
            total += (width + 2) * inside * (expansion > 1) + (9 + 2) * inside + (inside + 2) * channels
            width = channels
    total += (320 + 2) * 1280
    for classes in (10, 100, 1000):
        params = jax.eval_shape(MobileNetV2(classes).init, jax.random.key(0))
        assert size(params) == total + (1280 + 1) * classes
    assert total + 1281 * 1000 == 3_504_872


def convolved(x, weight, stride, groups):
    return jax.lax.conv_general_dilated(
        x,
        weight,
        (stride, stride),
        ((weight.shape[0] // 2,) * 2,) * 2,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=groups,
    )


def normed(layer, x, groups):
    x = np.asarray(x, np.float64)
    if groups:
        grouped = np.split(x, groups, axis=3)
        centred = [part - part.mean((1, 2, 3), keepdims=True) for part in grouped]
        x = np.concatenate([p / np.sqrt((p**2).mean((1, 2, 3), keepdims=True) + 1e-5) for p in centred], axis=3)
    return (x * np.asarray(layer["scale"]) + np.asarray(layer["move"])).astype(np.float32)


def reference(params, images, strides, groups):
    """Compute MobileNet-v2 from its definition, with XLA for every convolution, 1×1 included."""

    def layer(own, x, stride=1, depth=1, bounded=True):
        weight = own["weight"]
        weight = weight[:, :, None] if depth > 1 else weight[None, None] if weight.ndim == 2 else weight
        out = normed(own, convolved(x, weight, stride, depth), groups)
        return np.clip(out, 0, 6) if bounded else out

    x = layer(params["stem"], jnp.asarray(images), 2)
    for i, stride in enumerate(strides, start=1):
        block, inside = params[f"block{i}"], x
        if "widen" in block:
            inside = layer(block["widen"], inside)
        inside = layer(block["places"], inside, stride, depth=inside.shape[3])
        inside = layer(block["narrow"], inside, bounded=False)
        x = x + inside if inside.shape == x.shape else inside
    x = layer(params["last"], x).mean((1, 2))
    return x @ np.asarray(params["dense"]["weight"]) + np.asarray(params["dense"]["bias"])


@pytest.mark.parametrize("groups", [2])
def test_logits_are_those_of_plain_convolutions(groups):
    model = MobileNetV2(classes=3, stem=4, stages=TINY.stages, last=8, groups=groups)
    params, rng = model.init(jax.random.key(1)), np.random.default_rng(2)
    # Scales differ from 1 and shifts from 0, so that the test notices them; the dense layer is drawn small.
    params = jax.tree.map(lambda leaf: leaf + 0.3 * rng.normal(size=leaf.shape).astype(np.float32), params)
    images = rng.uniform(size=(2, 9, 9, 3)).astype(np.float32)
    expected = reference(params, images, (1, 2, 1), groups)
    assert np.std(expected) > 1e-2
    np.testing.assert_allclose(jax.jit(model.apply)(params, images), expected, rtol=1e-3, atol=1e-4)


def test_gray_images_are_refused():
    params = jax.eval_shape(TINY.init, jax.random.key(0))
    with pytest.raises(InvalidInput, match=r"images: got \(2, 8, 8, 1\); allowed: .*3\]"):
        TINY.apply(params, jnp.zeros((2, 8, 8, 1)))
