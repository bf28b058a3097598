"""SVR-INTERACT: INTERACT on mini-batches, with estimates that are corrected instead of computed anew."""

from dataclasses import replace
from typing import ClassVar

import equinox as eqx
import jax
from jaxtyping import PyTree

from hyperpush.bilevel.algorithm import LOOP, Bilevel
from hyperpush.bilevel.interact import INTERACT
from hyperpush.bilevel.inverse import ConjugateGradients, Inverse, check_estimates, down, expected, own_slopes
from hyperpush.bilevel.steps import Step, check_step, step_at
from hyperpush.bilevel.storm import at_both, recursive
from hyperpush.checks import whole
from hyperpush.estimators.state import Declaration
from hyperpush.problem import Problem
from hyperpush.program import Context, Exchange, Inbox, Node, Repeat, Within


class _State(eqx.Module):
    params: PyTree
    hyper: PyTree
    estimates: tuple[PyTree, PyTree]  # p, v
    tracker: PyTree  # u


class SVRINTERACT(eqx.Module):
    """x⁺ = Wx − αu,  y⁺ = y − βv,  u⁺ = Wu + p⁺ − p, with estimates p of the own hyper-gradient h_i and v of ∂_y g_i.

    In every `period`-th iteration p and v are taken on all examples; else p⁺ = p + h_i(x⁺, y⁺) − h_i(x, y), v alike,
    both points on the same batch. A period of √N suits N examples. x are the hypers and y the params of a client, g
    its inner cost; α is `outer_step`, β `inner_step`. Liu, Zhang, Khanduri, Lu, Liu 2022.
    """

    declares: ClassVar[Declaration] = INTERACT.declares

    iterations: int = eqx.field(static=True)
    outer_step: Step = eqx.field(static=True)
    inner_step: Step = eqx.field(static=True)
    period: int = eqx.field(static=True)
    inverse: Inverse = ConjugateGradients()
    batch: int | None = eqx.field(static=True, default=None)

    def __check_init__(self):
        whole("SVRINTERACT.iterations", self.iterations, least=0)
        check_step("SVRINTERACT.outer_step", self.outer_step)
        check_step("SVRINTERACT.inner_step", self.inner_step)
        whole("SVRINTERACT.period", self.period, least=1)
        check_estimates("SVRINTERACT", self.inverse, self.batch)

    def program(self, problem: Problem) -> Node:
        def full(params: PyTree, hyper: PyTree, ctx: Context):
            return own_slopes(problem, expected(self.inverse), params, hyper, ctx.data, None, ctx.key)

        def enter(state: Bilevel, ctx: Context) -> _State:
            estimates = full(state.params, state.hyper, ctx)
            return _State(state.params, state.hyper, estimates, estimates[0])

        def receive(state: _State, inbox: Inbox, ctx: Context) -> _State:
            mixed, tracker = inbox.mix((state.hyper, state.tracker))
            hyper = down(mixed, state.tracker, step_at(self.outer_step, ctx.round))
            params = down(state.params, state.estimates[1], step_at(self.inner_step, ctx.round))

            def corrected():
                def estimate(point: tuple[PyTree, PyTree]):
                    return own_slopes(problem, self.inverse, *point, ctx.data, self.batch, ctx.key)

                return recursive(state.estimates, *at_both(estimate, (params, hyper), (state.params, state.hyper)))

            anew = (ctx.round + 1) % self.period == 0
            estimates = jax.lax.cond(anew, lambda: full(params, hyper, ctx), corrected)
            tracker = jax.tree.map(lambda u, new, old: u + new - old, tracker, estimates[0], state.estimates[0])
            return _State(params, hyper, estimates, tracker)

        exchange = Exchange(lambda state, ctx: (state.hyper, state.tracker), receive, weights="gossip")
        return Within(
            Repeat(exchange, self.iterations, name=LOOP),
            enter,
            leave=lambda before, state, ctx: replace(before, params=state.params, hyper=state.hyper),
        )
