"""The closed form of the hypergradient, with explicit Hessians."""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float

from hyperpush.data.batches import everything
from hyperpush.hypergradients.base import HypergradientEstimator, HypergradientState, outer_gradient_shares
from hyperpush.hypergradients.implicit_cg import implicit
from hyperpush.method import MethodInfo
from hyperpush.problem import Problem
from hyperpush.programs import Average, Context, Node


class Dense(HypergradientEstimator):
    """The closed form of the hypergradient: explicit Hessians, and one linear system that is solved directly.

        d F̄ / dλ_i = (1/n) ∂_λ F_i − B_i (Σ_k H_k)⁻¹ (1/n) Σ_j ∂_x F_j

    Every client forms its d×d Hessian at its own params and sends it once (Pedregosa, arXiv:1602.02355).

    **Use it** on small problems, to compare with. **Avoid it** elsewhere: it keeps and sends d² numbers.
    """

    info: ClassVar[MethodInfo] = MethodInfo(
        network="server",
        target="global",
        sends="a Hessian and a vector of the size of the params, once",
        matrices=True,
        paper="Pedregosa, Hyperparameter optimization with approximate gradient",
    )

    def program(self, problem: Problem) -> Node:
        def get(state: HypergradientState, ctx: Context) -> Any:
            at, back = ravel_pytree(state.params)
            examples = everything(ctx.data.train)

            def gradient(x: Float[Array, " d"]):
                return ravel_pytree(problem.inner_gradient(back(x), state.hyper, examples))[0]

            source, _ = outer_gradient_shares(problem, state, ctx)
            return (jax.jacfwd(gradient)(at), ravel_pytree(source)[0]), jnp.ones(())

        def put(state: HypergradientState, means: tuple[Float[Array, "d d"], Float[Array, " d"]], mass, ctx: Context):
            q = jnp.linalg.solve(*means)
            return implicit(problem, state, outer_gradient_shares(problem, state, ctx)[1], q, ctx)

        return Average(get, put, rounds=1, by="exact")
