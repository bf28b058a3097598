"""Variance-reduced directed recurrent backpropagation."""

from typing import ClassVar

import equinox as eqx
import jax
from jaxtyping import PyTree

from hyperpush.checks import check_probability
from hyperpush.hypergradients.base import HypergradientEstimator, HypergradientState
from hyperpush.hypergradients.recurrent import Backward, Variant, add, check_recurrent, enter, maps, reversed_weights
from hyperpush.method import MethodInfo, Number, as_number
from hyperpush.problem import Problem
from hyperpush.programs import Exchange, Inbox, Node, Repeat, Scope


class _State(eqx.Module):
    back: Backward
    w: PyTree


class VRHGP(HypergradientEstimator):
    """Variance-reduced hypergradient push: two running estimates of `DirectedRB`'s series, so that early noise fades.

    From v = 0 and u = w = c_x, with the maps A and B of `recurrent.py`, `steps` times

        v ← α(v + B u) + (1 − α) B w,   u⁺ = A u,   w ← β(A w + c_x) + (1 − β)(w + u⁺)

    and v + c_λ in the end ("Personalized decentralized bilevel optimization over stochastic and directed networks").

    **Use it** where the noise of `DirectedRB` is too large: on links that change at random, or with mini-batches.
    **Avoid it** on fixed links with all examples: it sends and computes twice as much for the same result.

    Args:
        steps: Terms of the series. With 0 the result is (1/n) ∂_λ F_i.
        step_size: γ, above 0: the step size of the SGP that trained, at its end.
        alpha: α from 0 to 1; 0.9 is the paper's. With α = 1 and β = 0 it is `DirectedRB`.
        beta: β from 0 to 1; 0.1 is the paper's.
        variant: That of the SGP that trained, `"gradient-first"` or `"gradient-after"`.
        batch_size: Training examples per mini-batch, drawn anew in each step; None uses all.

    Raises:
        InvalidInput: An option is out of range; the message names it and what is allowed.
    """

    info: ClassVar[MethodInfo] = MethodInfo(
        network="two-way",
        target="global",
        sends="two vectors of the size of the params per step",
        paper="Personalized decentralized bilevel optimization over stochastic and directed networks",
        note="through the steps of SGP",
        example={"steps": 20, "step_size": 0.1},
    )

    steps: int = eqx.field(static=True)
    step_size: Number = eqx.field(converter=as_number)
    alpha: Number = eqx.field(converter=as_number, default=0.9)
    beta: Number = eqx.field(converter=as_number, default=0.1)
    variant: Variant = eqx.field(static=True, default="gradient-first")
    batch_size: int | None = eqx.field(static=True, default=None)

    def __check_init__(self):
        check_recurrent(self)
        check_probability("VRHGP.alpha", self.alpha)
        check_probability("VRHGP.beta", self.beta)

    def program(self, problem: Problem) -> Node:
        def start(state: HypergradientState, ctx):
            back, _ = enter(problem, state, ctx)
            return _State(back, back.source)

        def receive(state: _State, inbox: Inbox, ctx):
            back, alpha, beta = state.back, self.alpha, self.beta
            mixed_u, mixed_w = inbox.mix((back.u, state.w))
            options = (self.step_size, self.variant, self.batch_size)
            a_u, b_u = maps(problem, back, ctx, back.u, mixed_u, *options)
            a_w, b_w = maps(problem, back, ctx, state.w, mixed_w, *options)
            value = jax.tree.map(lambda v, bu, bw: alpha * (v + bu) + (1 - alpha) * bw, back.value, b_u, b_w)
            w = jax.tree.map(lambda aw, c, w, u: beta * (aw + c) + (1 - beta) * (w + u), a_w, back.source, state.w, a_u)
            return _State(Backward(back.params, back.hyper, back.links, back.source, a_u, value), w)

        def leave(before: HypergradientState, state: _State, ctx):
            value = add(state.back.value, enter(problem, before, ctx)[1])
            return HypergradientState(before.params, before.hyper, value, before.links)

        exchange = Exchange(
            send=lambda state, ctx: (state.back.u, state.w),
            receive=receive,
            weights=lambda state, ctx: reversed_weights(state.back, ctx),
        )
        return Scope(Repeat(exchange, self.steps, name="VRHGP"), start, leave)
