"""Hessians of real models, a dense network and a CNN with L2, compared with NumPy's solution of the dense system."""

from functools import cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree
from scipy.optimize import minimize
from sklearn.datasets import load_digits

import hyperpush as hp

CLIENTS, EXAMPLES, CLASSES = 4, 20, 4
NETWORK = hp.networks.RandomDirected(CLIENTS, seed=1)
RATE = np.log(1e-2)  # L2 rate


def logits(params, images):
    if "kernel" in params:
        seen = jax.lax.conv_general_dilated(images.reshape(-1, 1, 8, 8), params["kernel"], (2, 2), "VALID")
        hidden = jnp.tanh(seen + params["shift"][:, None, None]).reshape(len(images), -1)
    else:
        hidden = jnp.tanh(images @ params["first"] + params["shift"])
    return hidden @ params["last"] + params["bias"]


def losses(params, hyper, batch):
    images, labels = batch
    scores = logits(params, images)
    return jax.nn.logsumexp(scores, axis=1) - jnp.take_along_axis(scores, labels[:, None], axis=1)[:, 0]


def penalty(params, hyper):
    """Return the L2 penalty with one rate per layer."""
    parts = zip(jnp.exp(hyper), jax.tree.leaves(params), strict=True)
    return sum(rate * jnp.sum(leaf**2) for rate, leaf in parts)


def start(model):
    random, units = np.random.default_rng(0), 3
    if model == "cnn":
        wide, layers = 27, {"kernel": random.normal(size=(units, 1, 3, 3)) / 3}
    else:
        wide, layers = units, {"first": random.normal(size=(64, units)) / 8}
    last = random.normal(size=(wide, CLASSES)) / np.sqrt(wide)
    return layers | {"shift": np.zeros(units), "last": last, "bias": np.zeros(CLASSES)}


class Point(NamedTuple):
    """Params of a model, all clients' hypergradients there, and the smallest eigenvalue of the mean Hessian."""

    params: dict[str, np.ndarray]
    data: list[tuple[np.ndarray, np.ndarray]]
    truth: np.ndarray
    smallest: float

    def estimate(self, dtype: str) -> hp.Estimate:
        def cast(array):
            return jnp.asarray(array, dtype if np.issubdtype(array.dtype, np.floating) else "int32")

        params, train, validation = jax.tree.map(cast, (self.params, *self.data))
        hypers = jnp.full(len(params), RATE, dtype)
        costs = {"inner": losses, "penalty": penalty, "outer": losses}
        task = hp.Task(**costs, params=params, hypers=hypers, train=train, validation=validation)
        return hp.hypergradient(task, hp.Automatic(), NETWORK, key=0)

    def error(self, estimate: hp.Estimate) -> float:
        away = np.linalg.norm(np.asarray(estimate.value, np.float64) - self.truth, axis=1)
        return float((away / np.linalg.norm(self.truth, axis=1)).max())


@cache
def train(model: str, steps: int, newton: int = 0) -> Point:
    """Minimize the mean cost of clients with few labels each in float64, by steps of L-BFGS, then of Newton."""
    images, labels = load_digits(n_class=CLASSES, return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))[: 2 * CLIENTS * EXAMPLES]
    first, second = np.split(order, 2)
    first = first[np.argsort(labels[first], kind="stable")]
    data = [(images[part].reshape(CLIENTS, -1, 64) / 16, labels[part].reshape(CLIENTS, -1)) for part in (first, second)]
    with jax.enable_x64(True):
        begin, back = ravel_pytree(jax.tree.map(jnp.asarray, start(model)))
        hyper = jnp.full(len(start(model)), RATE)

        def inner(x, hyper, batch):
            return jnp.mean(losses(back(x), hyper, batch)) + penalty(back(x), hyper)

        def mean_inner(x):
            return jnp.mean(jax.vmap(lambda batch: inner(x, hyper, batch))(data[0]))

        def mean_outer(x):
            return jnp.mean(jax.vmap(lambda batch: losses(back(x), hyper, batch))(data[1]))

        slope, hessian_at = jax.jit(jax.value_and_grad(mean_inner)), jax.jit(jax.hessian(mean_inner))
        x = minimize(slope, begin, jac=True, options={"maxiter": steps}, method="L-BFGS-B").x if steps else begin
        for _ in range(newton):
            x = x - np.linalg.solve(hessian_at(x), slope(x)[1])
        hessian = np.asarray(hessian_at(x))
        q = np.linalg.solve(hessian, np.asarray(jax.grad(mean_outer)(x))) / CLIENTS
        coupling = jax.vmap(lambda batch: jax.jacobian(jax.grad(inner, argnums=1))(x, hyper, batch))(data[0])
        params = jax.tree.map(np.asarray, back(x))
    return Point(params, data, -np.asarray(coupling) @ q, np.linalg.eigvalsh(hessian)[0])


@pytest.mark.parametrize(
    ("model", "dtype", "bound"),
    [
        pytest.param("dense", "float64", 1e-5, marks=pytest.mark.long),
        pytest.param("cnn", "float32", 1e-3, marks=pytest.mark.long),
    ],
)
def test_at_a_minimum_the_default_is_right_and_says_so(model, dtype, bound):
    point = train(model, 60, newton=6)
    assert point.smallest > 0
    with jax.enable_x64(dtype == "float64"):
        found = point.estimate(dtype)
    assert point.error(found) < bound
    assert found.status.error is not None
    assert found.status.residual is not None
    assert point.error(found) < found.status.error
    assert (found.status.converged, found.status.reason) == (True, "tolerance")
    assert found.status.residual < 1e-3


@pytest.mark.parametrize(
    ("model", "dtype"), [("dense", "float64"), pytest.param("cnn", "float32", marks=pytest.mark.long)]
)
@pytest.mark.parametrize("steps", [0, 5])
@pytest.mark.long
def test_before_a_minimum_is_reached_it_says_that_the_hessian_is_indefinite(model, dtype, steps):
    point = train(model, steps)
    assert point.smallest < 0
    with jax.enable_x64(dtype == "float64"):
        status = point.estimate(dtype).status
    assert (status.converged, status.reason) == (False, "ill-posed")
