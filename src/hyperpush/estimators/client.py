"""Each client's own outer cost at the solution that all share."""

from typing import ClassVar

import equinox as eqx
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from hyperpush.data.batches import everything
from hyperpush.estimators.implicit_cg import Solving, check_solving, conjugate_gradients, implicit, start_solving
from hyperpush.estimators.state import Declaration, Hyper
from hyperpush.problem import Problem
from hyperpush.program import Context, Node, Within


class ClientGradient(eqx.Module):
    """d_{λ_i} F_i(x*(λ), λ_i) = ∂_λF_i − B_i (Σ_k H_k)^{-1} ∂_xF_i: everyone for itself on the shared model.

    There is one linear system per client, and everybody's Hessian is part of each. Once all know all right-hand sides,
    every iteration of conjugate gradients averages the products of each Hessian with n directions exactly, which sends
    n·d numbers. `iterations` and `damping` are those of `ImplicitCG`. The target is that of Chen, Huang, Ma 2022.
    """

    declares: ClassVar[Declaration] = Declaration(
        network="a server, or any that can average exactly",
        target="client: the own outer cost at the shared inner solution",
        sends="n vectors of the size of the params per iteration",
        matrices=False,
        paper="Chen, Huang and Ma, Decentralized bilevel optimization",
    )

    iterations: int = eqx.field(static=True)
    damping: float = eqx.field(static=True, converter=float, default=0.0)

    def __check_init__(self):
        check_solving("ClientGradient", self.iterations, self.damping)

    def program(self, problem: Problem) -> Node:
        def outer_gradients(state: Hyper, ctx: Context):
            return problem.outer_gradients(state.params, state.hyper, everything(ctx.data.outer))

        def enter(state: Hyper, ctx: Context):
            own, _ = ravel_pytree(outer_gradients(state, ctx)[0])
            # The mean over clients is everyone's (1/n)∂_xF_i, as Σ_k H_k is n times the mean Hessian.
            return start_solving(state, jnp.zeros((ctx.clients, own.size), own.dtype).at[ctx.client].set(own))

        def leave(before: Hyper, state: Solving, ctx: Context):
            return implicit(problem, before, outer_gradients(before, ctx)[1], state.q[ctx.client], ctx)

        return Within(conjugate_gradients(problem, self.iterations, self.damping, None, "ClientGradient"), enter, leave)
