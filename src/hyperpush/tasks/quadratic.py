"""Quadratics, different at every client, whose solution and hypergradient have closed forms."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from hyperpush.starts import per_client
from hyperpush.task import Task
from hyperpush.tasks.synthetic import quadratics


def inner(params, hyper, data):
    """½xᵀAx − bᵀx + λᵀCx."""
    return 0.5 * params @ data["hessian"] @ params - data["linear"] @ params + hyper @ data["coupling"] @ params


def outer(params, hyper, data):
    """½‖Dx − e‖² + ½‖λ − g‖²."""
    misfit = data["map"] @ params - data["target"]
    return 0.5 * jnp.sum(misfit**2) + 0.5 * jnp.sum((hyper - data["hyper_target"]) ** 2)


def quadratic(clients: int, seed: int, *, inner_size: int = 4, hyper_size: int = 3, common: bool = False) -> Task:
    """Random strongly convex inner costs; params and hypers start at zero and at random."""
    generator = np.random.default_rng(seed)
    first, second = quadratics(clients, inner_size, hyper_size, generator)
    hypers = generator.normal(size=(clients, hyper_size))
    dtype = jnp.zeros(()).dtype
    hypers, first, second = jax.tree.map(lambda a: jnp.asarray(a, dtype), (hypers, first, second))
    return Task(
        inner=inner,
        outer=outer,
        params=jnp.zeros(inner_size, dtype),
        hypers=per_client(hypers),
        train=first,
        validation=second,
        common=common,
    )


def outer_fixed_points(first: PyTree, second: PyTree) -> dict[str, np.ndarray]:
    """Where algorithms with one hyper λ for all clients end, by NumPy: `x_G`, `x_L` and `x_M` (algorithms/base.py).

    All three are zeros of an affine function of λ: the mean over clients of λ − g_i − C_i S_i D_iᵀ(D_i y_i(λ) − e_i),
    with y_i(λ) the common or the own inner solution and S_i the inverse of the mean or the own Hessian.
    """
    first, second = (jax.tree.map(lambda a: np.asarray(a, np.float64), part) for part in (first, second))
    hessian, coupling, maps = first["hessian"], first["coupling"], second["map"]
    n, hypers, _ = coupling.shape

    def zero(common_solution: bool, common_hessian: bool) -> np.ndarray:
        solve = np.linalg.inv(np.broadcast_to(hessian.mean(0), hessian.shape) if common_hessian else hessian)
        if common_solution:
            inverse = np.linalg.inv(hessian.mean(0))
            still = np.broadcast_to(inverse @ first["linear"].mean(0), (n, hessian.shape[1]))
            slope = np.broadcast_to(-inverse @ coupling.mean(0).T, (n, hessian.shape[1], hypers))
        else:
            inverse = np.linalg.inv(hessian)
            still = np.einsum("nij,nj->ni", inverse, first["linear"])
            slope = -inverse @ coupling.transpose(0, 2, 1)
        if common_hessian:  # the mean of the outer gradients goes through the mean coupling
            pull = np.einsum("nij,ni->nj", maps, np.einsum("nij,nj->ni", maps, still) - second["target"]).mean(0)
            bend = (maps.transpose(0, 2, 1) @ maps @ slope).mean(0)
            through = coupling.mean(0) @ solve[0]
            constant, linear = through @ pull, through @ bend
        else:
            pull = np.einsum("nij,ni->nj", maps, np.einsum("nij,nj->ni", maps, still) - second["target"])
            through = coupling @ solve
            constant = np.einsum("nij,nj->i", through, pull) / n
            linear = (through @ maps.transpose(0, 2, 1) @ maps @ slope).mean(0)
        return np.linalg.solve(np.eye(hypers) - linear, second["hyper_target"].mean(0) + constant)

    return {"x_G": zero(True, True), "x_L": zero(False, False), "x_M": zero(True, False)}
