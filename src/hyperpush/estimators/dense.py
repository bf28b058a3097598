"""The closed form of the hyper-gradient, with explicit Hessians."""

from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float

from hyperpush.data.batches import everything
from hyperpush.estimators.implicit_cg import implicit
from hyperpush.estimators.state import Declaration, Hyper, shared_gradients
from hyperpush.problem import Problem
from hyperpush.program import Average, Context, Node


class Dense(eqx.Module):
    """(1/n)∂_λF_i − B_i (Σ_k H_k)^{-1} (1/n)Σ_j ∂_xF_j, the system solved directly.

    Every client forms its d×d Hessian at its own params and sends it, once: for small problems.
    """

    declares: ClassVar[Declaration] = Declaration(
        network="a server, or any that can average exactly",
        target="global: everybody's mean outer cost",
        sends="a Hessian and a vector of the size of the params, once",
        matrices=True,
        paper="Pedregosa, Hyperparameter optimization with approximate gradient",
    )

    def program(self, problem: Problem) -> Node:
        def get(state: Hyper, ctx: Context) -> Any:
            at, back = ravel_pytree(state.params)
            examples = everything(ctx.data.inner)

            def gradient(x: Float[Array, " d"]):
                return ravel_pytree(problem.inner_gradient(back(x), state.hyper, examples))[0]

            source, _ = shared_gradients(problem, state, ctx)
            return (jax.jacfwd(gradient)(at), ravel_pytree(source)[0]), jnp.ones(())

        def put(state: Hyper, means: tuple[Float[Array, "d d"], Float[Array, " d"]], mass, ctx: Context):
            q = jnp.linalg.solve(*means)
            return implicit(problem, state, shared_gradients(problem, state, ctx)[1], q, ctx)

        return Average(get, put, rounds=1, by="exact")
