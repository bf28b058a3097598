"""Hypergradients of each client's own outer cost at the shared inner solution."""

from typing import ClassVar

import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from hyperpush.hypergradients.base import HypergradientState, outer_gradients
from hyperpush.hypergradients.implicit import Implicit, Solving, finish_solving, solve_together, start_solving
from hyperpush.methods.base import MethodInfo
from hyperpush.programs import Context, Node, Scope
from hyperpush.task.problem import Problem


class ClientGradient(Implicit):
    """Derivative of each client's own outer cost at the shared inner solution.

    The result of client i, at the inner solution x*(λ) that all clients share, is

        d F_i(x*(λ), λ_i) / dλ_i = ∂_λ F_i − B_i (Σ_k H_k)⁻¹ ∂_x F_i

    with H_k = ∂²_xx f_k, B_i = ∂²_λx f_i, inner costs f and outer costs F. There is one linear system per client, with
    the sum of all Hessians. First all clients receive all right-hand sides. Then every step of conjugate gradients
    takes exact means of the products with n directions. The target is that of Chen, Huang and Ma, arXiv:2206.05670.

    **Use it** if clients minimize only their own costs on a shared model. **Avoid it** with many clients: it sends
    n·d numbers per step.

    Departures from the paper:
        1. All clients' systems are solved together by conjugate gradients with exact averages; the paper solves them
           by decentralized steps with gossip.

    Args:
        steps: Limit of iterations, at least 1. Up to rounding, the number of distinct eigenvalues suffices.
        damping: Added to the diagonal of the mean Hessian, 0 or more. Above 0 it makes a singular Hessian positive
            definite, and biases the result.
        singular: Treatment of a singular Hessian. `"refuse"` marks the result as not converged. `"minimum-norm"`
            leaves out directions without curvature; the result is not converged if the outer gradient has a part
            there. `"damping"` needs a `damping` above 0.

    Raises:
        InvalidInput: An option is out of range; the message names it and what is allowed.

    Example:
        >>> import hyperpush as hp
        >>> task, network = hp.tasks.quadratic(5, seed=0), hp.networks.RandomDirected(5)
        >>> hp.check(task, hp.hypergradients.ClientGradient(steps=4), network, key=0).passed
        True
    """

    info: ClassVar[MethodInfo] = MethodInfo(
        network="server",
        target="client",
        sends="n + 1 vectors of the size of the params, and n + 1 numbers, per step",
        paper="Chen, Huang and Ma, Decentralized bilevel optimization",
        example={"steps": 10},
    )

    def program(self, problem: Problem) -> Node:
        def start(state: HypergradientState, ctx: Context) -> Solving:
            own, _ = ravel_pytree(outer_gradients(problem, state, ctx)[0])
            # The mean over clients is (1/n)∂_xF_i of each client, as Σ_k H_k is n times the mean Hessian.
            rights = jnp.zeros((ctx.clients, own.size), own.dtype).at[ctx.client].set(own)
            return start_solving(problem, self, state, rights, ctx)

        def finish(before: HypergradientState, state: Solving, ctx: Context) -> HypergradientState:
            _, direct = outer_gradients(problem, before, ctx)
            return finish_solving(problem, before, direct, state.system(ctx.client), state.probe, ctx)

        return Scope(solve_together(problem, self), start, finish)
