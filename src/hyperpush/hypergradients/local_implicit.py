"""A client's own hypergradient: everything but the point it is taken at is its own."""

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, PyTree

from hyperpush.hypergradients.implicit import System
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
    """h_i = ∂_λF_i − B_i (H_i + damping·I)⁻¹ ∂_xF_i at any (params, hyper), by `steps` of conjugate gradients.

    Directions in which the matrix is not positive are left alone.
    """
    along_x, along_hyper = problem.outer_gradients(params, hyper, outer_batch)
    right, back = ravel_pytree(along_x)

    def multiply(vector: Float[Array, " d"]) -> Float[Array, " d"]:
        product = problem.hessian_product(params, hyper, inner_batch, back(vector))
        return ravel_pytree(product)[0] + damping * vector

    def step(_, system: System) -> System:
        return system.advance(multiply(system.direction), only_convex=True)

    q = jax.lax.fori_loop(0, steps, step, System.start(right)).q
    return jax.tree.map(jnp.subtract, along_hyper, problem.jacobian_product(params, hyper, inner_batch, back(q)))
