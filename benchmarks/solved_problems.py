"""Random inner problems with a dense answer in float64: the solution, its hypergradients, and errors against them."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

import hyperpush as hp

CLASSES, HIDDEN, NEWTON = 3, 4, 300
Loss = Callable[[Any, Any, Any], Any]


def square(x: Any, hyper: Any, batch: Any) -> Any:
    rows, targets = batch
    return (rows @ x - targets) ** 2


def logistic(x: Any, hyper: Any, batch: Any) -> Any:
    rows, labels = batch
    return jnp.logaddexp(0, -labels * (rows @ x))


def softmax(x: Any, hyper: Any, batch: Any) -> Any:
    rows, labels = batch
    scores = rows @ x.reshape(rows.shape[-1], CLASSES)
    return jax.nn.logsumexp(scores, axis=-1) - jnp.take_along_axis(scores, labels[..., None], -1)[..., 0]


def mlp(x: Any, hyper: Any, batch: Any) -> Any:
    rows, targets = batch
    first, last = x[:-HIDDEN].reshape(rows.shape[-1], HIDDEN), x[-HIDDEN:]
    return (jnp.tanh(rows @ first) @ last - targets) ** 2


def l2(x: Any, hyper: Any) -> Any:
    return jnp.exp(hyper) * jnp.sum(x**2)


FAMILIES: dict[str, tuple[Loss, int]] = {"regression": (square, 5), "logistic": (logistic, 5), "softmax": (softmax, 4),
                                         "mlp": (mlp, 3)}  # fmt: skip


class Drawn(NamedTuple):
    """A task, with its arrays."""

    task: hp.Task
    loss: Loss
    train: Any
    validation: Any
    params: np.ndarray
    hypers: np.ndarray


def of_readme(clients: int = 20, unlike: bool = False) -> Drawn:
    """Return the first task of the README; `unlike` clients have features of different scales."""
    keys = jax.random.split(jax.random.key(0))
    inputs = np.asarray(jax.random.normal(keys[0], (clients, 60, 5)))
    if unlike:
        inputs = inputs * np.exp(0.7 * np.random.default_rng(1).normal(size=(clients, 1, 5)))
    targets = inputs @ np.arange(5.0) + 3 * np.asarray(jax.random.normal(keys[1], (clients, 60)))
    sets = [(inputs[:, part], targets[:, part]) for part in (slice(10), slice(10, None))]
    return _drawn(square, sets[0], sets[1], np.zeros(5), np.zeros(clients))


def drawn(family: str, clients: int, seed: int, at_zero: bool = False) -> Drawn:
    """Return a random problem; with `at_zero` the targets are pure noise, so its solution is near zero."""
    loss, features = FAMILIES[family]
    random = np.random.default_rng(seed)
    scales = 10 ** (-random.uniform(0, 1) * np.linspace(0, 1, features))
    apart = np.exp(random.uniform(0, 0.7) * random.normal(size=(clients, 1, features)))
    rows = random.normal(size=(clients, 48, features)) * scales * apart
    truth = np.zeros(features) if at_zero else random.normal(size=features) / scales
    noise = random.uniform(0.1, 1) * random.normal(size=rows.shape[:2])
    along = rows @ truth + noise + 0.3 * random.normal(size=(clients, 1))
    labels: np.ndarray = along
    if family == "logistic":
        labels = np.where(along >= 0, 1.0, -1.0)
    if family == "softmax":
        labels = np.digitize(along, np.quantile(along, [1 / 3, 2 / 3]))
    count = {"softmax": features * CLASSES, "mlp": (features + 1) * HIDDEN}.get(family, features)
    start = 0.3 * random.normal(size=count) if family == "mlp" else np.zeros(count)
    hypers = random.uniform(-5, 0, clients)
    sets = [(rows[:, part], labels[:, part]) for part in (slice(24), slice(24, None))]
    return _drawn(loss, sets[0], sets[1], start, hypers)


def _drawn(loss: Loss, train: Any, validation: Any, params: np.ndarray, hypers: np.ndarray) -> Drawn:
    task = hp.Task(inner=loss, penalty=l2, outer=loss, params=jnp.asarray(params), hypers=hp.per_client(hypers),
                   train=_arrays(train), validation=_arrays(validation))  # fmt: skip
    return Drawn(task, loss, train, validation, params, hypers)


def solve(made: Drawn, near: Any, hypers: Any = None) -> np.ndarray:
    """Return the minimum next to a point, by damped Newton steps in float64."""
    hypers = made.hypers if hypers is None else np.asarray(hypers, float)
    with jax.enable_x64(True):
        cost, derivatives = _compiled(made, hypers)
        x = np.asarray(near, float)
        value, gradient, hessian = derivatives(x)
        for _ in range(NEWTON):
            values, vectors = np.linalg.eigh(hessian)
            step = -vectors @ ((vectors.T @ gradient) / np.maximum(np.abs(values), 1e-9 * np.abs(values).max()))
            while cost(x + step) > value + 1e-14 * abs(value) and np.linalg.norm(step) > 1e-13:
                step = step / 2
            x = x + step
            value, gradient, hessian = derivatives(x)
            if np.linalg.norm(step) <= 1e-12 * np.linalg.norm(x):
                break
        return x


def hypergradients(made: Drawn, x: np.ndarray, hypers: Any = None) -> np.ndarray:
    """Return d(mean outer cost)/dλ_i at a solution, by one dense solve in float64."""
    hypers = made.hypers if hypers is None else np.asarray(hypers, float)
    with jax.enable_x64(True):
        _, derivatives = _compiled(made, hypers)
        _, _, hessian = derivatives(x)
        outer = jax.grad(lambda x: jnp.mean(jax.vmap(lambda *batch: made.loss(x, None, batch))(*made.validation)))
        solved = np.linalg.solve(hessian, np.asarray(outer(jnp.asarray(x))))
        return -np.exp(hypers) * 2 * (x @ solved) / len(hypers)  # ∂²_λx of exp(λ)‖x‖² is 2 exp(λ) x


def _compiled(made: Drawn, hypers: np.ndarray) -> tuple[Any, Any]:
    """Return functions for the mean inner cost, and for the cost with its gradient and Hessian."""
    pair = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf)), made.train)
    cost, derivatives = _functions(made.loss)
    rates = jnp.asarray(hypers)
    return lambda x: float(cost(x, rates, pair)), lambda x: jax.tree.map(np.asarray, derivatives(x, rates, pair))


_made: dict[Any, Any] = {}


def _functions(loss: Loss) -> Any:
    if loss not in _made:

        def cost(x: Any, rates: Any, pair: Any) -> Any:
            own = jax.vmap(lambda rate, *batch: jnp.mean(loss(x, None, batch)) + l2(x, rate))(rates, *pair)
            return jnp.mean(own)

        _made[loss] = jax.jit(cost), jax.jit(lambda *at: (cost(*at), jax.grad(cost)(*at), jax.hessian(cost)(*at)))
    return _made[loss]


def relative(found: Any, truth: Any) -> float:
    """Return the error's root mean square over clients, relative to that of the truth."""
    difference = np.asarray(found, float).reshape(len(found), -1) - np.asarray(truth).reshape(len(truth), -1)
    return float(np.linalg.norm(difference) / max(np.linalg.norm(truth), 1e-300))


def away(params: Any, x: np.ndarray) -> float:
    """Return the distance of the clients' params to the solution, root mean square, relative to it."""
    each = np.stack([ravel_pytree(own)[0] for own in params]).astype(float)
    return float(np.sqrt(np.mean(np.sum((each - x) ** 2, 1))) / max(np.linalg.norm(x), 1e-300))


def _arrays(pair: Any) -> Any:
    return jax.tree.map(jnp.asarray, pair)
