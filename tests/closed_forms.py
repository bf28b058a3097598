"""Quadratic bilevel problems solved by NumPy alone."""

import jax
import jax.numpy as jnp
import numpy as np

from hyperpush.problems.quadratic import quadratic


def solution(hypers, first):
    """x* = (Σ A_k)^{-1} Σ_k (b_k − C_kᵀ λ_k)."""
    pull = first["linear"] - np.einsum("nhd,nh->nd", first["coupling"], hypers)
    return np.linalg.solve(first["hessian"].sum(0), pull.sum(0))


def mean_outer_cost(hypers, first, second):
    x = solution(hypers, first)
    misfit = second["map"] @ x - second["target"]
    return np.mean(0.5 * (misfit**2).sum(1) + 0.5 * ((hypers - second["hyper_target"]) ** 2).sum(1))


def closed_form(hypers, first, second):
    """(1/n)∂_λF_i − C_i (Σ A_k)^{-1} (1/n)Σ_j D_jᵀ(D_j x* − e_j)."""
    n = len(hypers)
    x = solution(hypers, first)
    pull = np.einsum("nij,ni->j", second["map"], second["map"] @ x - second["target"]) / n
    q = np.linalg.solve(first["hessian"].sum(0), pull)
    return (hypers - second["hyper_target"]) / n - first["coupling"] @ q


def setting(clients, seed):
    problem, _, hypers, first, second = quadratic(clients, seed)
    first, second = (jax.tree.map(np.asarray, part) for part in (first, second))
    x = solution(np.asarray(hypers), first)
    at = jnp.broadcast_to(x, (clients, x.size))
    truth = closed_form(np.asarray(hypers), first, second)
    largest = np.linalg.eigvalsh(first["hessian"].mean(0)).max()
    return problem, at, hypers, first, second, truth, largest
