"""SVR-INTERACT: INTERACT on mini-batches, with estimates that are corrected instead of computed anew."""

from dataclasses import replace
from typing import ClassVar

import equinox as eqx
import jax
from jaxtyping import PyTree

from hyperpush.algorithms.base import LOOP, Algorithm, BilevelState
from hyperpush.algorithms.interact import INTERACT
from hyperpush.algorithms.inverse import ConjugateGradients, Inverse, check_estimates, down, expected, own_slopes
from hyperpush.algorithms.steps import check_step_sizes
from hyperpush.algorithms.storm import at_both, recursive
from hyperpush.checks import check_integer
from hyperpush.method import MethodInfo, as_number
from hyperpush.optimizers import StepSize, step_size_at
from hyperpush.problem import Problem
from hyperpush.programs import Context, Exchange, Inbox, Node, Repeat, Scope


class _State(eqx.Module):
    params: PyTree
    hyper: PyTree
    estimates: tuple[PyTree, PyTree]  # p, v
    tracker: PyTree  # u


class SVRINTERACT(Algorithm):
    """INTERACT on mini-batches, with estimates that are corrected instead of computed anew.

    With estimates p of the own hypergradient h_i and v of ∂_y g_i (Liu et al., arXiv:2207.13283):

        x⁺ = Wx − αu,   y⁺ = y − βv,   u⁺ = Wu + p⁺ − p

    In every `period`-th iteration p and v take all examples; else p⁺ = p + h_i(x⁺, y⁺) − h_i(x, y), v alike, both
    points on the same batch. Params are the client's own, hypers become common.

    **Use it** instead of `INTERACT` where clients have many examples. **Avoid it** where the inner solution must be
    common: it ends at x_L.

    Departures from the paper:

    1. `inverse` is conjugate gradients on all examples by default. On all examples a `Neumann` takes all its terms.

    Args:
        steps: Iterations, one round of gossip each.
        outer_step_size: α, above 0; a number or a schedule by iteration.
        inner_step_size: β, above 0; a number or a schedule by iteration.
        period: Iterations between two estimates on all examples, at least 1; 1 takes all each time. √N suits N
            examples.
        inverse: How H_i⁻¹ is applied: `ConjugateGradients(steps)` or `Neumann(terms, step_size)`.
        batch_size: Examples per estimate, drawn anew each time; None uses all. Numbers need `inverse=Neumann(…)`.

    Raises:
        InvalidInput: An option is out of range; the message names it and what is allowed.
    """

    info: ClassVar[MethodInfo] = replace(
        INTERACT.info, example={"steps": 4, "outer_step_size": 0.05, "inner_step_size": 0.1, "period": 2}
    )

    steps: int = eqx.field(static=True)
    outer_step_size: StepSize = eqx.field(converter=as_number)
    inner_step_size: StepSize = eqx.field(converter=as_number)
    period: int = eqx.field(static=True)
    inverse: Inverse = ConjugateGradients()
    batch_size: int | None = eqx.field(static=True, default=None)

    def __check_init__(self):
        check_integer("SVRINTERACT.steps", self.steps, minimum=0)
        check_step_sizes(self, "outer_step_size", "inner_step_size")
        check_integer("SVRINTERACT.period", self.period, minimum=1)
        check_estimates("SVRINTERACT", self.inverse, self.batch_size)

    def program(self, problem: Problem) -> Node:
        def full(params: PyTree, hyper: PyTree, ctx: Context):
            return own_slopes(problem, expected(self.inverse), params, hyper, ctx.data, None, ctx.key)

        def enter(state: BilevelState, ctx: Context) -> _State:
            estimates = full(state.params, state.hyper, ctx)
            return _State(state.params, state.hyper, estimates, estimates[0])

        def receive(state: _State, inbox: Inbox, ctx: Context) -> _State:
            mixed, tracker = inbox.mix((state.hyper, state.tracker))
            hyper = down(mixed, state.tracker, step_size_at(self.outer_step_size, ctx.round))
            params = down(state.params, state.estimates[1], step_size_at(self.inner_step_size, ctx.round))

            def corrected():
                def estimate(point: tuple[PyTree, PyTree]):
                    return own_slopes(problem, self.inverse, *point, ctx.data, self.batch_size, ctx.key)

                return recursive(state.estimates, *at_both(estimate, (params, hyper), (state.params, state.hyper)))

            anew = (ctx.round + 1) % self.period == 0
            estimates = jax.lax.cond(anew, lambda: full(params, hyper, ctx), corrected)
            tracker = jax.tree.map(lambda u, new, old: u + new - old, tracker, estimates[0], state.estimates[0])
            return _State(params, hyper, estimates, tracker)

        exchange = Exchange(lambda state, ctx: (state.hyper, state.tracker), receive, weights="gossip")
        return Scope(
            Repeat(exchange, self.steps, name=LOOP),
            enter,
            leave=lambda before, state, ctx: replace(before, params=state.params, hyper=state.hyper),
        )
