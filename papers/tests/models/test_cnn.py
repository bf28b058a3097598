"""Convolutional networks compared with XLA's own convolution and pooling, and with finite differences."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from wide import float64 as float64

from hyperpush.base.errors import InvalidInput
from hyperpush_papers.common.models.cnn import CNN, EMNIST, INFLUENCE

# sizes of the feature maps: 11 to 5, then 3 to 1
TINY = CNN(channels=(2, 3), hidden=(4,), classes=3, size=13, kernel=3)


COLORED = CNN(channels=(2,), hidden=(), classes=2, size=6, kernel=3, colors=3)


def reference(params, images, convolutions, dense):
    """Compute the CNN with XLA's convolution, ReLU and pooling, and its dense layers with NumPy."""
    x = jnp.asarray(images).reshape(*images.shape[:3], -1)
    for i in range(1, convolutions + 1):
        weight, bias = params[f"conv{i}"]["weight"], params[f"conv{i}"]["bias"]
        x = jax.lax.conv_general_dilated(x, weight, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        x = jnp.maximum(x + bias, 0)
        x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    out = np.asarray(x).reshape(len(images), -1)
    for i in range(1, dense + 1):
        out = out @ np.asarray(params[f"dense{i}"]["weight"]) + np.asarray(params[f"dense{i}"]["bias"])
        out = np.maximum(out, 0) if i < dense else out
    return out


def size(params):
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def test_the_papers_models_have_their_numbers_of_parameters():
    emnist, influence = (jax.eval_shape(model.init, jax.random.key(0)) for model in (EMNIST, INFLUENCE))
    assert size(emnist) == 2_278_334
    assert size(influence) == (25 + 1) * 20 + (25 * 20 + 1) * 20 + (320 + 1) * 10
    assert influence["dense1"]["weight"].shape == (320, 10)
    assert emnist["dense1"]["weight"].shape == (4 * 4 * 64, 2048)


@pytest.mark.parametrize("model", [TINY, INFLUENCE, COLORED], ids=["odd maps, a hidden layer", "influence", "colors"])
def test_logits_are_those_of_plain_convolutions(model):
    params = model.init(jax.random.key(1))
    shape = (3, model.size, model.size, *([model.colors] if model.colors > 1 else []))
    images = np.random.default_rng(2).normal(size=shape).astype(np.float32)
    expected = reference(params, images, len(model.channels), 1 + len(model.hidden))
    assert np.std(expected) > 1e-3
    np.testing.assert_allclose(jax.jit(model.apply)(params, images), expected, rtol=1e-4, atol=1e-5)


def test_weights_and_biases_are_uniform_up_to_one_over_the_root_of_the_inputs():
    params = INFLUENCE.init(jax.random.key(3))
    for name, inputs in (("conv1", 25), ("conv2", 500), ("dense1", 320)):
        weight, bias = (np.asarray(params[name][part]) * np.sqrt(inputs) for part in ("weight", "bias"))
        assert 0.9 < np.max(np.abs(weight)) <= 1
        assert 0.5 < np.max(np.abs(bias)) <= 1
        # The variance of the uniform distribution on ±1 is 1/3, and its kurtosis 9/5.
        assert np.mean(weight) == pytest.approx(0, abs=4 / np.sqrt(3 * weight.size))
        assert np.mean(weight**2) == pytest.approx(1 / 3, abs=4 * np.sqrt(4 / 45 / weight.size))


def test_no_two_layers_are_drawn_alike():
    params = CNN(channels=(), hidden=(4, 4), classes=4, size=2).init(jax.random.key(4))
    numbers = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(params)])
    assert len(np.unique(numbers)) == numbers.size


@pytest.mark.usefixtures("float64")
def test_derivatives_are_those_of_finite_differences():
    rng = np.random.default_rng(5)
    images, labels = jnp.asarray(rng.normal(size=(4, 13, 13))), jnp.asarray([0, 1, 2, 1])
    params = TINY.init(jax.random.key(6))
    direction = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape)), params)

    def cost(params):
        chances = jax.nn.log_softmax(TINY.apply(params, images))
        return -jnp.mean(jnp.take_along_axis(chances, labels[:, None], axis=1))

    @jax.jit
    def along(t):
        at = jax.tree.map(lambda leaf, d: leaf + t * d, params, direction)
        gradient, product = jax.jvp(jax.grad(cost), (at,), (direction,))
        return cost(at), gradient, product

    h = 1e-5  # so short that no maximum or ReLU switches its active branch
    (before, low, _), (_, gradient, product), (after, high, _) = (along(t) for t in (-h, 0.0, h))
    slope = sum(map(np.vdot, jax.tree.leaves(gradient), jax.tree.leaves(direction)))
    assert abs(slope) > 0.01
    np.testing.assert_allclose(slope, (after - before) / (2 * h), rtol=1e-7)
    differences = jax.tree.map(lambda high, low: np.asarray(high - low) / (2 * h), high, low)
    assert all(np.max(np.abs(leaf)) > 1e-4 for leaf in jax.tree.leaves(differences))
    jax.tree.map(lambda *both: np.testing.assert_allclose(*both, rtol=1e-5, atol=1e-7), product, differences)


def test_images_too_small_for_the_layers_are_refused():
    with pytest.raises(InvalidInput, match=r"CNN\.size: got 11; allowed: "):
        CNN(channels=(2, 2), hidden=(), classes=3, size=11, kernel=5)


def test_images_of_another_size_are_refused():
    params = TINY.init(jax.random.key(0))
    with pytest.raises(InvalidInput, match=r"images: got \(2, 12, 13\); allowed: .*13, 13"):
        TINY.apply(params, jnp.zeros((2, 12, 13)))
