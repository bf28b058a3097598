"""A client's second derivatives as matrices, for methods that send them."""

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, PyTree

from hyperpush.task.problem import Problem


def second_derivatives(
    problem: Problem, params: PyTree, hyper: PyTree, batch: PyTree
) -> tuple[Float[Array, "d d"], Float[Array, "h d"]]:
    """Return a client's matrices (∂²_xx f, ∂²_λx f), by a product with every unit vector."""
    flat, back = ravel_pytree(params)

    def products(unit: Float[Array, " d"]) -> tuple[Float[Array, " d"], Float[Array, " h"]]:
        along_x, along_hyper = problem.products(params, hyper, batch, back(unit))
        return ravel_pytree(along_x)[0], ravel_pytree(along_hyper)[0]

    hessian, mixed = jax.vmap(products)(jnp.eye(flat.size, dtype=flat.dtype))
    return hessian, mixed.T


def flat_outer_gradients(
    problem: Problem, params: PyTree, hyper: PyTree, batch: PyTree
) -> tuple[Float[Array, " d"], Float[Array, " h"]]:
    """Return (∂_x F, ∂_λ F) as vectors."""
    along_x, along_hyper = problem.outer_gradients(params, hyper, batch)
    return ravel_pytree(along_x)[0], ravel_pytree(along_hyper)[0]
