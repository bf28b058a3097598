"""Time of a step of `hp.train` relative to the bare gradient of a convolutional network, and the same for products."""

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from measured import later, peak, per_step
from script import Row

import hyperpush as hp

TITLE, PROCESSES, FROM_DISK = "A user's convolutional network", 1, False
SMALL, LARGE = (16, 32, ()), (32, 64, (2048,))  # channels of two convolutions, hidden units: 18 k and 2.2 M weights
BATCH, CLASSES = 32, 10
Model = tuple[Any, Callable[[Any, Any], Any]]  # params, and logits of (params, images)


def by_lax(channels: Any) -> Model:
    first, second, hidden = channels
    keys, units = jax.random.split(jax.random.key(0), 4), (16 * second, *hidden, CLASSES)
    shapes = [(5, 5, 1, first), (5, 5, first, second), *pairwise(units)]
    params = [0.05 * jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=False)]

    def logits(params: Any, x: Any) -> Any:
        for weight in params[:2]:
            x = lax.conv_general_dilated(x, weight, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))
            x = lax.reduce_window(jax.nn.relu(x), -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        x = x.reshape(x.shape[0], -1)
        for weight in params[2:-1]:
            x = jax.nn.relu(x @ weight)
        return x @ params[-1]

    return params, logits


def by_flax(channels: Any) -> Model:
    import flax.linen as nn  # pyright: ignore[reportMissingImports]

    first, second, _ = channels

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            for width in (first, second):
                x = nn.max_pool(nn.relu(nn.Conv(width, (5, 5), padding="VALID")(x)), (2, 2), (2, 2))
            return nn.Dense(CLASSES)(x.reshape(x.shape[0], -1))

    net = Net()
    return net.init(jax.random.key(0), jnp.zeros((1, 28, 28, 1))), net.apply


def by_equinox(channels: Any) -> Model:
    import equinox as eqx

    first, second, _ = channels
    keys = jax.random.split(jax.random.key(0), 3)
    layers = [eqx.nn.Conv2d(1, first, 5, key=keys[0]), eqx.nn.Conv2d(first, second, 5, key=keys[1])]
    net = (layers, eqx.nn.Linear(16 * second, CLASSES, key=keys[2]))
    params, rest = eqx.partition(net, eqx.is_inexact_array)
    pool = eqx.nn.MaxPool2d(2, 2)

    def logits(params: Any, x: Any) -> Any:
        convolutions, last = eqx.combine(params, rest)

        def one(image: Any) -> Any:
            image = image.transpose(2, 0, 1)
            for layer in convolutions:
                image = pool(jax.nn.relu(layer(image)))
            return last(image.ravel())

        return jax.vmap(one)(x)

    return params, logits


def cell(
    make: Callable[[Any], Model] = by_lax,
    channels: Any = SMALL,
    clients: int = 5,
    wide: bool = False,
    private: bool = False,
    products: bool = False,
    at_once: int | None = None,
) -> Row:
    jax.config.update("jax_enable_x64", wide)
    dtype = np.float64 if wide else np.float32
    params, logits = make(channels)
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), params)

    def losses(x: Any, hyper: Any, batch: Any) -> Any:
        chances = jax.nn.log_softmax(jnp.exp(hyper) * logits(x, batch[0]))
        return -jnp.take_along_axis(chances, batch[1][:, None], axis=1)[:, 0]

    generator = np.random.default_rng(0)
    images = generator.standard_normal((clients, BATCH, 28, 28, 1)).astype(dtype)
    data = (images, generator.integers(0, CLASSES, (clients, BATCH)))
    task = hp.Task(inner=losses, outer=losses, params=params, hypers=0.0, train=data, validation=data)
    if private:
        task = task.private(clip=1.0, noise=hp.privacy.Gaussian(1.0))
    network, engine = hp.networks.Ring(clients), hp.Simulate(clients_per_batch=at_once, compile_fully=True)

    def run(steps: int) -> Any:
        if products:
            method = hp.HGP(steps, 1, 0.001)
            return hp.hypergradient(task, method, network, key=0, engine=engine, certify=False).value
        trained = hp.train(task, hp.SGP(steps, 0.001), network, key=0, engine=engine, certify=False)
        return jax.tree.leaves(trained.task.params)

    batch = jax.tree.map(lambda leaf: jnp.asarray(leaf[0]), data)
    bare = jax.jit(partial(bare_product if products else bare_private if private else bare_gradient, losses))
    wall, cpu = per_step(run)
    alone = [clients * each for each in later(lambda: bare(params, jnp.zeros((), dtype), batch), 9)]
    weights = sum(leaf.size for leaf in jax.tree.leaves(params))
    return {"weights": weights, "ms_a_step": 1e3 * wall, "ratio": wall / alone[0], "ratio_of_cpu": cpu / alone[1]} | {
        "peak_megabytes": peak()
    }


def bare_gradient(losses: Any, params: Any, hyper: Any, batch: Any) -> Any:
    return jax.grad(lambda x: losses(x, hyper, batch).mean())(params)


def bare_product(losses: Any, params: Any, hyper: Any, batch: Any) -> Any:
    gradient = jax.grad(lambda x, h: losses(x, h, batch).mean(), argnums=(0, 1))
    return jax.jvp(lambda x: gradient(x, hyper), (params,), (params,))[1]


def bare_private(losses: Any, params: Any, hyper: Any, batch: Any) -> Any:
    def clipped(image: Any, label: Any) -> Any:
        gradient = bare_gradient(losses, params, hyper, (image[None], label[None]))
        norm = jnp.sqrt(sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(gradient)))
        return jax.tree.map(lambda leaf: leaf / jnp.maximum(norm, 1), gradient)

    return jax.tree.map(lambda leaf: leaf.mean(0), jax.vmap(clipped)(*batch))


CASES: dict[str, Callable[[], Row]] = {
    "2.2 M weights, lax.conv NHWC": partial(cell, channels=LARGE),
    "18 k weights, lax.conv NHWC": cell,
    "18 k, Flax": partial(cell, by_flax),
    "18 k, Equinox (NCHW)": partial(cell, by_equinox),
    "18 k, float64": partial(cell, wide=True),
    "18 k, private gradients": partial(cell, private=True),
    "18 k, 20 clients": partial(cell, clients=20),
    "18 k, products": partial(cell, products=True),
    "18 k, 20 clients, all at once": partial(cell, clients=20, at_once=20),
    "2.2 M weights, all at once": partial(cell, channels=LARGE, at_once=5),
}
