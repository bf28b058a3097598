"""Each client's own outer cost at the solution that all share."""

from typing import ClassVar

import equinox as eqx
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from hyperpush.data.batches import everything
from hyperpush.hypergradients.base import HypergradientEstimator, HypergradientState
from hyperpush.hypergradients.implicit_cg import Solving, check_solving, conjugate_gradients, implicit, start_solving
from hyperpush.method import MethodInfo, Number, as_number
from hyperpush.problem import Problem
from hyperpush.programs import Context, Node, Scope


class ClientGradient(HypergradientEstimator):
    """Each client's derivative of its own outer cost at the inner solution that all share.

        d F_i(x*(λ), λ_i) / dλ_i = ∂_λ F_i − B_i (Σ_k H_k)⁻¹ ∂_x F_i

    There is one linear system per client, and everybody's Hessian is part of each. Once all know all right-hand sides,
    every step of conjugate gradients averages the products of each Hessian with n directions exactly. The target is
    that of Chen, Huang and Ma, arXiv:2206.05670.

    **Use it** for clients that care for themselves alone, on a shared model. **Avoid it** with many clients: it sends
    n·d numbers per step.

    Args:
        steps: Iterations at most, at least 1. But for rounding as many as there are eigenvalues suffice.
        damping: Added to the diagonal of the mean Hessian, 0 or more, so that it is positive definite.

    Raises:
        InvalidInput: An option is out of range; the message names it and what is allowed.
    """

    info: ClassVar[MethodInfo] = MethodInfo(
        network="server",
        target="client",
        sends="n vectors of the size of the params per step",
        paper="Chen, Huang and Ma, Decentralized bilevel optimization",
        example={"steps": 10},
    )

    steps: int = eqx.field(static=True)
    damping: Number = eqx.field(converter=as_number, default=0.0)

    def __check_init__(self):
        check_solving(self)

    def program(self, problem: Problem) -> Node:
        def outer_gradients(state: HypergradientState, ctx: Context):
            return problem.outer_gradients(state.params, state.hyper, everything(ctx.data.outer))

        def enter(state: HypergradientState, ctx: Context):
            own, _ = ravel_pytree(outer_gradients(state, ctx)[0])
            # The mean over clients is everyone's (1/n)∂_xF_i, as Σ_k H_k is n times the mean Hessian.
            return start_solving(state, jnp.zeros((ctx.clients, own.size), own.dtype).at[ctx.client].set(own))

        def leave(before: HypergradientState, state: Solving, ctx: Context):
            return implicit(problem, before, outer_gradients(before, ctx)[1], state.q[ctx.client], ctx)

        return Scope(conjugate_gradients(problem, self.steps, self.damping, None, "ClientGradient"), enter, leave)
