"""The closed form of the hypergradient, with explicit Hessians."""

from typing import ClassVar

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float

from hyperpush.data.batches import everything
from hyperpush.hypergradients.base import (
    HypergradientEstimator,
    HypergradientState,
    outer_gradient_shares,
    subtract_indirect,
)
from hyperpush.method import MethodInfo
from hyperpush.problem import Problem
from hyperpush.programs import Average, Context, Node


class Dense(HypergradientEstimator):
    """The closed form of the hypergradient: explicit Hessians, and one linear system that is solved directly.

        d F̄ / dλ_i = (1/n) ∂_λ F_i − B_i (Σ_k H_k)⁻¹ (1/n) Σ_j ∂_x F_j

    Every client forms its d×d Hessian at its own params and sends it once (Pedregosa, arXiv:1602.02355).

    **Use it** on small problems, to compare with. **Avoid it** elsewhere: it keeps and sends d² numbers.

    Departures from the paper:
        1. The system is solved directly, not by conjugate gradients.

    Example:
        Four clients share x = 1, the inner solution. The true hypergradient of each is −1/4.

        >>> import jax.numpy as jnp
        >>> import hyperpush as hp
        >>> task = hp.Task(
        ...     inner=lambda x, log_rate, a: (x - a) ** 2,
        ...     penalty=lambda x, log_rate: jnp.exp(log_rate) * x**2,
        ...     outer=lambda x, log_rate, b: (x - b) ** 2, params=1.0, hypers=0.0,
        ...     train=jnp.array([[1.0], [2.0], [3.0], [2.0]]), validation=jnp.zeros((4, 1)),
        ... )
        >>> network = hp.networks.RandomDirected(4)
        >>> print(hp.hypergradient(task, hp.hypergradients.Dense(), network, key=0).value)
        [-0.25 -0.25 -0.25 -0.25]
    """

    info: ClassVar[MethodInfo] = MethodInfo(
        network="server",
        target="global",
        sends="a Hessian and a vector of the size of the params, once",
        matrices=True,
        paper="Pedregosa, Hyperparameter optimization with approximate gradient",
    )

    def program(self, problem: Problem) -> Node:
        def get_system(state: HypergradientState, ctx: Context):
            at, back = ravel_pytree(state.params)
            examples = everything(ctx.data.train)

            def gradient(x: Float[Array, " d"]) -> Float[Array, " d"]:
                return ravel_pytree(problem.inner_gradient(back(x), state.hyper, examples))[0]

            source, _ = outer_gradient_shares(problem, state, ctx)
            return (jax.jacfwd(gradient)(at), ravel_pytree(source)[0]), jnp.ones(())

        def solve(state: HypergradientState, means: tuple[Float[Array, "d d"], Float[Array, " d"]], mass, ctx: Context):
            q = ravel_pytree(state.params)[1](jnp.linalg.solve(*means))
            return subtract_indirect(problem, state, outer_gradient_shares(problem, state, ctx)[1], q, ctx)

        return Average(get_system, solve, rounds=1, by="exact")
