"""Random inner problems with a dense answer in float64: the solution, its hypergradients, and errors against them.

Regression, logistic and softmax problems have the same loss and shapes; their data decide which they are. So they share
compiled programs.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

import hyperpush as hp

CLASSES, HIDDEN, EXAMPLES = 3, 4, 24
SLOTS = 50  # clients of the dense problem: fewer are filled up with weights of zero, so that they share programs too
ABSENT = -40.0  # score of a class that a two-class problem does not have: exp of it is below rounding in float32
NEWTON = 300  # most steps of the dense solve
Loss = Callable[[Any, Any, Any], Any]


def square(x: Any, hyper: Any, batch: Any) -> Any:
    rows, targets = batch
    return (rows @ x - targets) ** 2


def linear(x: Any, hyper: Any, batch: Any) -> Any:
    """Squared error of the first score, or the cross-entropy of all, as each example says."""
    rows, targets, offsets, squared = batch
    scores = rows @ x
    errors = (scores[:, 0] - targets[:, 0]) ** 2
    entropies = jax.nn.logsumexp(scores + offsets, axis=-1) - jnp.sum(targets * scores, -1)
    return jnp.where(squared > 0, errors, entropies)


def mlp(x: Any, hyper: Any, batch: Any) -> Any:
    rows, targets = batch
    first, last = x[:-HIDDEN].reshape(rows.shape[-1], HIDDEN), x[-HIDDEN:]
    return (jnp.tanh(rows @ first) @ last - targets) ** 2


def digit(x: Any, hyper: Any, batch: Any) -> Any:
    rows, labels = batch
    scores = rows @ x.reshape(rows.shape[-1], 10)
    return jax.nn.logsumexp(scores, axis=-1) - jnp.take_along_axis(scores, labels[..., None], -1)[..., 0]


def l2(x: Any, hyper: Any) -> Any:
    return jnp.exp(hyper) * jnp.sum(x**2)


class Drawn(NamedTuple):
    """A task, with its arrays."""

    task: hp.Task
    loss: Loss
    train: Any
    validation: Any
    params: np.ndarray
    hypers: np.ndarray

    def at(self, hypers: np.ndarray) -> "Drawn":
        """Return the problem at other hypers."""
        return self._replace(task=self.task.at(hypers=jnp.asarray(hypers)), hypers=np.asarray(hypers, float))


def of_readme(clients: int = 20, unlike: bool = False) -> Drawn:
    """Return the first task of the README; `unlike` clients have features of different scales."""
    keys = jax.random.split(jax.random.key(0))
    inputs = np.asarray(jax.random.normal(keys[0], (clients, 60, 5)))
    if unlike:
        inputs = inputs * np.exp(0.7 * np.random.default_rng(1).normal(size=(clients, 1, 5)))
    targets = inputs @ np.arange(5.0) + 3 * np.asarray(jax.random.normal(keys[1], (clients, 60)))
    return _drawn(square, (inputs, targets), 10, np.zeros(5), np.zeros(clients))


def of_digits(clients: int = 8) -> Drawn:
    """Return softmax regression on scikit-learn's digits, 100 images per client."""
    from sklearn.datasets import load_digits  # only this problem needs it

    loaded: Any = load_digits()
    images, labels = loaded.data, loaded.target
    order = np.random.default_rng(0).permutation(len(images))[: clients * 100].reshape(clients, 100)
    return _drawn(digit, (images[order] / 16, labels[order]), 50, np.zeros(640), np.full(clients, -5.0))


def drawn(family: str, clients: int, size: int, seed: int, at_zero: bool = False, like: bool = False) -> Drawn:
    """Return a random problem with `size` params, or a small network of `size` features.

    With `at_zero` the targets are pure noise, so the solution is near zero. Clients that are `like` share one
    distribution.
    """
    random = np.random.default_rng(seed)
    features = size // CLASSES if family == "softmax" else size
    scales = 10 ** (-random.uniform(0, 1) * np.linspace(0, 1, features))
    apart = np.exp((0 if like else random.uniform(0, 0.7)) * random.normal(size=(clients, 1, features)))
    inputs = random.normal(size=(clients, 2 * EXAMPLES, features)) * scales * apart
    truth = np.zeros(features) if at_zero else random.normal(size=features) / scales
    noise = random.uniform(0.1, 1) * random.normal(size=inputs.shape[:2])
    along = inputs @ truth + noise + (0 if like else 0.3) * random.normal(size=(clients, 1))
    hypers = random.uniform(-5, 0, clients)
    if family == "mlp":
        start = 0.3 * random.normal(size=(features + 1) * HIDDEN)
        return _drawn(mlp, (inputs, along), EXAMPLES, start, hypers)
    return _drawn(linear, _scored(family, inputs, along), EXAMPLES, np.zeros(size), hypers)


def _scored(family: str, inputs: np.ndarray, along: np.ndarray) -> tuple[np.ndarray, ...]:
    """Return rows for all classes, targets, offsets and the kind of a linear problem."""
    rows = inputs[..., None, :] * np.eye(CLASSES)[:, :1]  # all but the first class score 0
    targets, offsets = along[..., None] * np.eye(CLASSES)[0], np.zeros((*along.shape, CLASSES))
    if family == "logistic":
        targets, offsets[..., 2] = np.eye(CLASSES)[(along < 0).astype(int)], ABSENT
    if family == "softmax":
        rows = np.einsum("...f,kc->...kcf", inputs, np.eye(CLASSES)).reshape(*along.shape, CLASSES, -1)
        targets = np.eye(CLASSES)[np.digitize(along, np.quantile(along, [1 / 3, 2 / 3]))]
    return rows, targets, offsets, np.full(along.shape, float(family == "regression"))


def _drawn(loss: Loss, data: tuple[np.ndarray, ...], split: int, params: np.ndarray, hypers: np.ndarray) -> Drawn:
    train, validation = ([each[:, part] for each in data] for part in (slice(split), slice(split, None)))
    task = hp.Task(inner=loss, penalty=l2, outer=loss, params=jnp.asarray(params), hypers=hp.per_client(hypers),
                   train=_arrays(train), validation=_arrays(validation))  # fmt: skip
    return Drawn(task, loss, train, validation, params, hypers)


def solve(made: Drawn, near: Any) -> np.ndarray:
    """Return the minimum next to a point, by damped Newton steps in float64."""
    cost, derivatives = _dense(made)
    x = np.asarray(near, float)
    value, gradient, hessian = derivatives(x)
    for _ in range(NEWTON):
        step = _descent(gradient, hessian)
        while cost(x + step) > value + 1e-14 * abs(value) and np.linalg.norm(step) > 1e-13:
            step = step / 2
        x = x + step
        value, gradient, hessian = derivatives(x)
        if np.linalg.norm(step) <= 1e-12 * np.linalg.norm(x):
            break
    return x


def _descent(gradient: np.ndarray, hessian: np.ndarray) -> np.ndarray:
    """Return the Newton step, with absolute eigenvalues where the Hessian is not positive definite."""
    try:
        np.linalg.cholesky(hessian)
        return -np.linalg.solve(hessian, gradient)
    except np.linalg.LinAlgError:
        values, vectors = np.linalg.eigh(hessian)
        return -vectors @ ((vectors.T @ gradient) / np.maximum(np.abs(values), 1e-9 * np.abs(values).max()))


def hypergradients(made: Drawn, x: np.ndarray) -> np.ndarray:
    """Return d(mean outer cost)/dλ_i at a solution, by one dense solve in float64."""
    _, _, hessian = _dense(made)[1](x)
    with jax.enable_x64(True):
        slopes = _functions(made.loss)[2](x, *_filled(made, made.validation))
    solved = np.linalg.solve(hessian, np.asarray(slopes))
    return -np.exp(made.hypers) * 2 * (x @ solved) / len(made.hypers)  # ∂²_λx of exp(λ)‖x‖² is 2 exp(λ) x


def descend(made: Drawn, steps: int) -> tuple[Drawn, np.ndarray]:
    """Return the problem after outer steps of Adam with rate 0.1 on dense hypergradients, and its solution."""
    x = made.params
    first = second = np.zeros_like(made.hypers)
    for step in range(1, steps + 1):
        x = solve(made, x)
        slope = hypergradients(made, x)
        first, second = 0.9 * first + 0.1 * slope, 0.999 * second + 0.001 * slope**2
        change = (first / (1 - 0.9**step)) / (np.sqrt(second / (1 - 0.999**step)) + 1e-8)
        made = made._replace(hypers=made.hypers - 0.1 * change)
    return made.at(made.hypers), solve(made, x)


def _dense(made: Drawn) -> tuple[Any, Any]:
    """Return functions for the mean inner cost, and for the cost with its gradient and Hessian."""
    with jax.enable_x64(True):
        filled = _filled(made, made.train)
    cost, derivatives, _ = _functions(made.loss)

    def at(function: Any, x: np.ndarray) -> Any:
        with jax.enable_x64(True):
            return jax.tree.map(np.asarray, function(x, *filled))

    return lambda x: float(at(cost, x)), lambda x: at(derivatives, x)


def _filled(made: Drawn, data: Any) -> Any:
    """Return weights, L2 rates and data of all clients, filled up to a common number."""
    missing = max(0, SLOTS - len(made.hypers)) if made.loss in (linear, mlp) else 0
    each = [np.asarray(leaf) for leaf in (np.ones(len(made.hypers)), made.hypers, *data)]
    weights, rates, *data = (jnp.asarray(np.pad(leaf, [(0, missing)] + [(0, 0)] * (leaf.ndim - 1))) for leaf in each)
    return weights / len(made.hypers), rates, data


@lru_cache
def _functions(loss: Loss) -> tuple[Any, Any, Any]:
    def outer(x: Any, weights: Any, rates: Any, data: Any) -> Any:
        return weights @ jax.vmap(lambda *batch: jnp.mean(loss(x, None, batch)))(*data)

    def cost(x: Any, weights: Any, rates: Any, data: Any) -> Any:
        return outer(x, weights, rates, data) + weights @ jax.vmap(lambda rate: l2(x, rate))(rates)

    both = jax.jit(lambda *at: (cost(*at), jax.grad(cost)(*at), jax.hessian(cost)(*at)))
    return jax.jit(cost), both, jax.jit(jax.grad(outer))


def relative(found: Any, truth: Any) -> float:
    """Return the error's root mean square over clients, relative to that of the truth."""
    difference = np.asarray(found, float).reshape(len(found), -1) - np.asarray(truth).reshape(len(truth), -1)
    return float(np.linalg.norm(difference) / max(np.linalg.norm(truth), 1e-300))


def away(params: Any, x: np.ndarray) -> float:
    """Return the distance of the clients' params to the solution, root mean square, relative to it."""
    each = np.stack([ravel_pytree(own)[0] for own in params]).astype(float)
    return float(np.sqrt(np.mean(np.sum((each - x) ** 2, 1))) / max(np.linalg.norm(x), 1e-300))


def _arrays(pair: Any) -> Any:
    return tuple(map(jnp.asarray, pair))
