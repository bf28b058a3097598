"""INTERACT: gradient tracking on the outer level, every client's inner problem its own."""

from dataclasses import replace
from typing import ClassVar

import equinox as eqx
import jax
from jaxtyping import PyTree

from hyperpush.algorithms.base import LOOP, Algorithm, BilevelState
from hyperpush.algorithms.inverse import down
from hyperpush.algorithms.steps import check_step_sizes
from hyperpush.checks import check_integer
from hyperpush.data.batches import everything
from hyperpush.hypergradients.local_implicit import own_hypergradient
from hyperpush.method import MethodInfo, as_number
from hyperpush.optimizers import StepSize, step_size_at
from hyperpush.problem import Problem
from hyperpush.programs import Context, Exchange, Inbox, Node, Repeat, Scope


class _State(eqx.Module):
    params: PyTree
    hyper: PyTree
    gradient: PyTree  # h_i at the last point
    tracker: PyTree  # u


class INTERACT(Algorithm):
    """Inner gradient descent, outer gradient tracking: every client's inner problem is its own.

    Each client has params y_i of its own; the hypers x_i become common by gossip with doubly stochastic W. With its
    inner cost g_i and its own hypergradient h_i = ∂_xF_i − J_i H_i⁻¹ ∂_yF_i (Liu et al., arXiv:2207.13283):

        x⁺ = Wx − αu,   y⁺ = y − β ∂_y g_i(x, y),   u⁺ = Wu + h_i(x⁺, y⁺) − h_i(x, y)

    **Use it** on undirected networks with few examples per client: it takes all of them in every iteration. **Avoid
    it** with many (`SVRINTERACT`), or where the inner solution must be common (`MADSBO`).

    Departures from the paper:

    1. h_i is computed by conjugate gradients instead of an exact inverse.

    Args:
        steps: Iterations, one round of gossip each.
        outer_step_size: α, above 0; a number or a schedule by iteration.
        inner_step_size: β, above 0; a number or a schedule by iteration. Constant steps need β < 2/λ_max(H_i).
        inner_steps: Steps of conjugate gradients for h_i, at least 1. As many as params suffice.

    Raises:
        InvalidInput: An option is out of range; the message names it and what is allowed.
    """

    info: ClassVar[MethodInfo] = MethodInfo(
        network="undirected",
        target="local",
        sends="hypers and their tracker",
        paper="Liu et al., INTERACT: achieving low sample and communication complexities in decentralized bilevel "
        "learning over networks, arXiv:2207.13283",
        note="the mean of own hypergradients at own inner solutions",
        fixed_point="x_L",
        example={"steps": 3, "outer_step_size": 0.05, "inner_step_size": 0.1, "inner_steps": 5},
    )

    steps: int = eqx.field(static=True)
    outer_step_size: StepSize = eqx.field(converter=as_number)
    inner_step_size: StepSize = eqx.field(converter=as_number)
    inner_steps: int = eqx.field(static=True, default=20)

    def __check_init__(self):
        check_integer("INTERACT.steps", self.steps, minimum=0)
        check_integer("INTERACT.inner_steps", self.inner_steps, minimum=1)
        check_step_sizes(self, "outer_step_size", "inner_step_size")

    def program(self, problem: Problem) -> Node:
        def gradient(params: PyTree, hyper: PyTree, ctx: Context) -> PyTree:
            batches = everything(ctx.data.train), everything(ctx.data.outer)
            return own_hypergradient(problem, params, hyper, *batches, self.inner_steps)

        def enter(state: BilevelState, ctx: Context) -> _State:
            own = gradient(state.params, state.hyper, ctx)
            return _State(state.params, state.hyper, own, own)

        def receive(state: _State, inbox: Inbox, ctx: Context) -> _State:
            mixed, tracker = inbox.mix((state.hyper, state.tracker))
            hyper = down(mixed, state.tracker, step_size_at(self.outer_step_size, ctx.round))
            slope = problem.inner_gradient(state.params, state.hyper, everything(ctx.data.train))
            params = down(state.params, slope, step_size_at(self.inner_step_size, ctx.round))
            own = gradient(params, hyper, ctx)
            tracker = jax.tree.map(lambda u, new, old: u + new - old, tracker, own, state.gradient)
            return _State(params, hyper, own, tracker)

        exchange = Exchange(lambda state, ctx: (state.hyper, state.tracker), receive, weights="gossip")
        return Scope(
            Repeat(exchange, self.steps, name=LOOP),
            enter,
            leave=lambda before, state, ctx: replace(before, params=state.params, hyper=state.hyper),
        )
