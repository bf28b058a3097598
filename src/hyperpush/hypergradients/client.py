"""Each client's own outer cost at the solution that all share."""

from typing import ClassVar

import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from hyperpush.hypergradients.base import HypergradientState, outer_gradients
from hyperpush.hypergradients.implicit import Implicit, Solving, finish_solving, solve_together, start_solving
from hyperpush.methods.base import MethodInfo
from hyperpush.programs import Context, Node, Scope
from hyperpush.task.problem import Problem


class ClientGradient(Implicit):
    """Each client's derivative of its own outer cost at the inner solution that all share.

        d F_i(x*(λ), λ_i) / dλ_i = ∂_λ F_i − B_i (Σ_k H_k)⁻¹ ∂_x F_i

    There is one linear system per client, and everybody's Hessian is part of each. Once all know all right-hand sides,
    every step of conjugate gradients averages the products of each Hessian with n directions exactly. The target is
    that of Chen, Huang and Ma, arXiv:2206.05670.

    **Use it** for clients that care for themselves alone, on a shared model. **Avoid it** with many clients: it sends
    n·d numbers per step.

    Departures from the paper:
        1. All clients' systems are solved together by conjugate gradients with exact averages; the paper solves them
           by decentralized steps with gossip.

    Args:
        steps: Iterations at most, at least 1. But for rounding as many as there are different eigenvalues suffice.
        damping: Added to the diagonal of the mean Hessian, 0 or more. Above 0 it makes a singular Hessian positive
            definite, and biases the result.
        singular: What to do with a singular Hessian. `"refuse"` marks the result as not converged. `"minimum-norm"`
            leaves out directions without curvature; it is not converged if the outer gradient has a part there.
            `"damping"` takes `damping`, which must be above 0 then.

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
        sends="n + 1 vectors of the size of the params, and as many numbers, per step",
        paper="Chen, Huang and Ma, Decentralized bilevel optimization",
        example={"steps": 10},
    )

    def program(self, problem: Problem) -> Node:
        def start(state: HypergradientState, ctx: Context) -> Solving:
            own, _ = ravel_pytree(outer_gradients(problem, state, ctx)[0])
            # The mean over clients is everyone's (1/n)∂_xF_i, as Σ_k H_k is n times the mean Hessian.
            rights = jnp.zeros((ctx.clients, own.size), own.dtype).at[ctx.client].set(own)
            return start_solving(problem, self, state, rights, ctx)

        def finish(before: HypergradientState, state: Solving, ctx: Context) -> HypergradientState:
            _, direct = outer_gradients(problem, before, ctx)
            return finish_solving(problem, before, direct, state.system(ctx.client), state.probe, ctx)

        return Scope(solve_together(problem, self), start, finish)
