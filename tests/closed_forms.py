"""Quadratic bilevel problems solved by NumPy alone."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import hyperpush as hp
from hyperpush.tasks.quadratic import quadratic


def solution(hypers, first):
    """Return the inner solution x* = (Σ A_k)^{-1} Σ_k (b_k − C_kᵀ λ_k)."""
    pull = first["linear"] - np.einsum("nhd,nh->nd", first["coupling"], hypers)
    return np.linalg.solve(first["hessian"].sum(0), pull.sum(0))


def mean_outer_cost(hypers, first, second):
    x = solution(hypers, first)
    misfit = second["map"] @ x - second["target"]
    return np.mean(0.5 * (misfit**2).sum(1) + 0.5 * ((hypers - second["hyper_target"]) ** 2).sum(1))


def closed_form(hypers, first, second):
    """Return the hypergradients (1/n)∂_λF_i − C_i (Σ A_k)^{-1} (1/n)Σ_j D_jᵀ(D_j x* − e_j)."""
    n = len(hypers)
    x = solution(hypers, first)
    pull = np.einsum("nij,ni->j", second["map"], second["map"] @ x - second["target"]) / n
    q = np.linalg.solve(first["hessian"].sum(0), pull)
    return (hypers - second["hyper_target"]) / n - first["coupling"] @ q


class Setting(NamedTuple):
    """A task whose params are the inner solution, with its data and its hypergradient from NumPy."""

    task: hp.Task
    first: dict[str, np.ndarray]
    second: dict[str, np.ndarray]
    truth: np.ndarray
    largest: float  # largest eigenvalue of the mean Hessian


def setting(clients, seed):
    task = quadratic(clients, seed)
    first, second = (jax.tree.map(np.asarray, part) for part in (task.train, task.validation))
    hypers = np.asarray(task.hypers)
    x = solution(hypers, first)
    at = jnp.broadcast_to(x, (clients, x.size))
    largest = np.linalg.eigvalsh(first["hessian"].mean(0)).max()
    return Setting(task.at(params=at), first, second, closed_form(hypers, first, second), float(largest))


def with_data(task, train=None, validation=None, hypers=None):
    """Return the quadratic task with other data in its costs."""
    return hp.Task(
        inner=task.inner,
        outer=task.outer,
        params=hp.per_client(task.params),
        hypers=hp.per_client(task.hypers if hypers is None else hypers),
        train=task.train if train is None else train,
        validation=task.validation if validation is None else validation,
    )


def data(made):
    """Return the training and validation data of a quadratic task."""
    return jax.tree.map(np.asarray, (made.train, made.validation))


def least_squares(made):
    """Return rows and right-hand side with mean outer cost F̄ = mean of ½‖rows·λ − right‖²; λ stacks all hypers."""
    first, second = data(made)
    n, h, d = first["coupling"].shape
    inverse = np.linalg.inv(first["hessian"].sum(0))
    # the solution is affine in the hypers: x* = slope·λ + offset
    slope = -inverse @ first["coupling"].reshape(n * h, d).T
    offset = inverse @ first["linear"].sum(0)
    rows = np.concatenate([second["map"] @ slope, np.eye(n * h).reshape(n, h, n * h)], axis=1)
    right = np.concatenate([second["target"] - second["map"] @ offset, second["hyper_target"]], axis=1)
    return rows.reshape(-1, n * h), right.ravel()
