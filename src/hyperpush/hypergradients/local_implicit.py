"""Compute a client's own hypergradient at any point, from its own costs and data alone."""

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import PyTree

from hyperpush.base.numbers import Number
from hyperpush.hypergradients.implicit import System
from hyperpush.task.problem import Problem


def own_hypergradient(
    problem: Problem, params: PyTree, hyper: PyTree, inner_batch: PyTree, outer_batch: PyTree, steps: int
) -> PyTree:
    """Return h_i = ∂_λF_i − B_i H_i⁻¹ ∂_xF_i at any (params, hyper), by `steps` of conjugate gradients.

    The steps end at a direction without positive curvature.
    """
    along_x, along_hyper = problem.outer_gradients(params, hyper, outer_batch)
    right, back = ravel_pytree(along_x)
    (system,) = solve_own(problem, params, hyper, inner_batch, [System.start(right, steps)], steps)
    product = problem.jacobian_product(params, hyper, inner_batch, back(system.q))
    return jax.tree.map(jnp.subtract, along_hyper, product)


def solve_own(
    problem: Problem,
    params: PyTree,
    hyper: PyTree,
    batch: PyTree,
    systems: list[System],
    steps: int,
    damping: Number = 0.0,
) -> list[System]:
    """Return the systems after `steps` conjugate-gradient steps, with the client's own Hessian plus `damping`·I."""
    back = ravel_pytree(params)[1]

    def advance(system: System) -> System:
        image = ravel_pytree(problem.hessian_product(params, hyper, batch, back(system.direction)))[0]
        return system.advance(image + damping * system.direction, jnp.linalg.norm(image))

    return jax.lax.fori_loop(0, steps, lambda _, systems: [advance(system) for system in systems], systems)
