"""A client's own hypergradient: everything but the point it is taken at is its own."""

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from hyperpush.method import Number
from hyperpush.problem import Problem


def own_hypergradient(
    problem: Problem,
    params: PyTree,
    hyper: PyTree,
    inner_batch: PyTree,
    outer_batch: PyTree,
    steps: int,
    damping: Number = 0.0,
) -> PyTree:
    """h_i = ∂_λF_i − B_i (H_i + damping·I)^{-1} ∂_xF_i at any (params, hyper), by `steps` of conjugate gradients.

    Directions in which the matrix is not positive are left alone.
    """
    along_x, along_hyper = problem.outer_gradients(params, hyper, outer_batch)

    def step(_, held):
        q, residual, direction, size = held
        product = problem.hessian_product(params, hyper, inner_batch, direction)
        product = jax.tree.map(lambda h, p: h + damping * p, product, direction)
        bend = dot(direction, product)
        length = jnp.where(bend > 0, size / jnp.where(bend > 0, bend, 1), 0)
        q = jax.tree.map(lambda q, p: q + length * p, q, direction)
        residual = jax.tree.map(lambda r, h: r - length * h, residual, product)
        after = dot(residual, residual)
        turn = jnp.where(size > 0, after / jnp.where(size > 0, size, 1), 0)
        return q, residual, jax.tree.map(lambda r, p: r + turn * p, residual, direction), after

    zero = jax.tree.map(jnp.zeros_like, along_x)
    q, *_ = jax.lax.fori_loop(0, steps, step, (zero, along_x, along_x, dot(along_x, along_x)))
    product = problem.jacobian_product(params, hyper, inner_batch, q)
    return jax.tree.map(jnp.subtract, along_hyper, product)


def dot(a: PyTree, b: PyTree):
    return sum(jnp.vdot(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))
