"""Regressions of any condition number, with an inner solution by Newton's method in NumPy."""

import jax.numpy as jnp
import numpy as np

import hyperpush as hp


def square(x, hyper, batch):
    rows, targets = batch
    return 0.5 * (rows @ x - targets) ** 2


def logistic(x, hyper, batch):
    rows, labels = batch
    return jnp.logaddexp(0, -labels * (rows @ x))


def penalty(x, hyper):
    return 0.5 * jnp.sum(jnp.exp(hyper) * x**2)


def data(condition=1e4, clients=6, examples=12, d=8, seed=0):
    draw = np.random.default_rng(seed)
    rows = draw.normal(size=(clients, examples, d)) * condition ** (-0.5 * np.linspace(0, 1, d))
    labels = np.sign(rows.sum(-1) + 0.3 * draw.normal(size=rows.shape[:2]))
    return rows, labels, np.log(1 / condition) + 0.5 * draw.normal(size=(clients, d))


def task_of(loss, rows, labels, log_rates, start=None):
    pair = jnp.asarray(rows), jnp.asarray(labels)
    start = jnp.zeros(rows.shape[-1]) if start is None else jnp.asarray(start)
    hypers = hp.per_client(jnp.asarray(log_rates))
    return hp.Task(inner=loss, outer=loss, params=start, hypers=hypers, train=pair, validation=pair, penalty=penalty)


def derivatives(loss, x, rows, labels, log_rates):
    """Return the gradient and the Hessian of the mean cost, in NumPy."""
    along, weight = rows @ x, np.ones(labels.shape)
    slope = along - labels
    if loss is logistic:
        share = 1 / (1 + np.exp(labels * along))
        slope, weight = -labels * share, share * (1 - share)
    rate, count = np.exp(log_rates).mean(0), labels.size
    gradient = np.einsum("nmd,nm->d", rows, slope) / count + rate * x
    return gradient, np.einsum("nmd,nm,nme->de", rows, weight, rows) / count + np.diag(rate)


def solution(loss, *given):
    x = np.zeros(given[0].shape[-1])
    for _ in range(60):
        gradient, hessian = derivatives(loss, x, *given)
        x = x - np.linalg.solve(hessian, gradient)
    return x
