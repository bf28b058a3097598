"""INTERACT: gradient tracking on the outer level, every client's inner problem its own."""

from dataclasses import replace
from typing import ClassVar

import equinox as eqx
import jax
from jaxtyping import PyTree

from hyperpush.bilevel.algorithm import LOOP, Bilevel
from hyperpush.checks import positive, whole
from hyperpush.data.batches import everything
from hyperpush.estimators.own import own_hypergradient
from hyperpush.estimators.state import Declaration
from hyperpush.problem import Problem
from hyperpush.program import Context, Exchange, Inbox, Node, Repeat, Within


class _State(eqx.Module):
    params: PyTree
    hyper: PyTree
    gradient: PyTree  # h_i at the last point
    tracker: PyTree  # u


class INTERACT(eqx.Module):
    """x⁺ = Wx − αu, y⁺ = y − β∂_y g_i(x, y), u⁺ = Wu + h_i(x⁺, y⁺) − h_i(x, y), with the own hyper-gradient h_i.

    x are the hypers and y the params of a client, g its inner cost; W is doubly stochastic. Liu, Zhang, Khanduri, Lu,
    Liu 2022. h_i by `inner_iterations` of conjugate gradients.
    """

    declares: ClassVar[Declaration] = Declaration(
        network="undirected",
        target="local: the mean of own hyper-gradients at own inner solutions",
        sends="hypers and their tracker",
        matrices=False,
        paper="Liu et al., INTERACT: achieving low sample and communication complexities",
        needs="undirected",
        fixed_point="x_L",
    )

    iterations: int = eqx.field(static=True)
    outer_step: float = eqx.field(static=True, converter=float)
    inner_step: float = eqx.field(static=True, converter=float)
    inner_iterations: int = eqx.field(static=True, default=20)

    def __check_init__(self):
        whole("INTERACT.iterations", self.iterations, least=0)
        whole("INTERACT.inner_iterations", self.inner_iterations, least=1)
        positive("INTERACT.outer_step", self.outer_step)
        positive("INTERACT.inner_step", self.inner_step)

    def program(self, problem: Problem) -> Node:
        def gradient(params: PyTree, hyper: PyTree, ctx: Context) -> PyTree:
            batches = everything(ctx.data.inner), everything(ctx.data.outer)
            return own_hypergradient(problem, params, hyper, *batches, self.inner_iterations)

        def enter(state: Bilevel, ctx: Context) -> _State:
            own = gradient(state.params, state.hyper, ctx)
            return _State(state.params, state.hyper, own, own)

        def receive(state: _State, inbox: Inbox, ctx: Context) -> _State:
            mixed, tracker = inbox.mix((state.hyper, state.tracker))
            hyper = jax.tree.map(lambda x, u: x - self.outer_step * u, mixed, state.tracker)
            slope = problem.inner_gradient(state.params, state.hyper, everything(ctx.data.inner))
            params = jax.tree.map(lambda y, g: y - self.inner_step * g, state.params, slope)
            own = gradient(params, hyper, ctx)
            tracker = jax.tree.map(lambda u, new, old: u + new - old, tracker, own, state.gradient)
            return _State(params, hyper, own, tracker)

        exchange = Exchange(lambda state, ctx: (state.hyper, state.tracker), receive, weights="gossip")
        return Within(
            Repeat(exchange, self.iterations, name=LOOP),
            enter,
            leave=lambda before, state, ctx: replace(before, params=state.params, hyper=state.hyper),
        )
