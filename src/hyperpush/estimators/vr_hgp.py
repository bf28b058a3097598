"""Variance-reduced directed recurrent backpropagation."""

from typing import ClassVar

import equinox as eqx
import jax
from jaxtyping import PyTree

from hyperpush.errors import InvalidInput
from hyperpush.estimators.recurrent import Backward, Order, add, check_options, enter, maps, reversed_weights
from hyperpush.estimators.state import Declaration, Hyper
from hyperpush.problem import Problem
from hyperpush.program import Exchange, Inbox, Node, Repeat, Within


class _State(eqx.Module):
    back: Backward
    w: PyTree


class VRHGP(eqx.Module):
    """Two running estimates of the same series, weighted so that early noise is forgotten.

        v ← α(v + B u) + (1 − α) B w,   u⁺ = A u,   w ← β(A w + c_x) + (1 − β)(w + u⁺);   v + c_λ in the end

    from v = 0, u = w = c_x. Sends u and w. α = 1, β = 0 is `DirectedRB`; (0.9, 0.1) are the weights recommended in
    "Personalized decentralized bilevel optimization over stochastic and directed networks", whose VR-HGP this is. The
    other options are those of `DirectedRB`.
    """

    declares: ClassVar[Declaration] = Declaration(
        network="any whose links can run both ways: directed, time-varying",
        target="global, through the steps of SGP",
        sends="two vectors of the size of the params",
        matrices=False,
        paper="Personalized decentralized bilevel optimization over stochastic and directed networks",
        needs="two-way",
    )

    rounds: int = eqx.field(static=True)
    step: float = eqx.field(static=True, converter=float)
    alpha: float = eqx.field(static=True, converter=float, default=0.9)
    beta: float = eqx.field(static=True, converter=float, default=0.1)
    order: Order = eqx.field(static=True, default="gradient-first")
    batch: int | None = eqx.field(static=True, default=None)

    def __check_init__(self):
        check_options("VRHGP", self.rounds, self.step, self.order, self.batch)
        for field, given in (("alpha", self.alpha), ("beta", self.beta)):
            if not 0 <= given <= 1:
                raise InvalidInput(f"VRHGP.{field}", given, "a number from 0 to 1")

    def program(self, problem: Problem) -> Node:
        def start(state: Hyper, ctx):
            back, _ = enter(problem, state, ctx)
            return _State(back, back.source)

        def receive(state: _State, inbox: Inbox, ctx):
            back, alpha, beta = state.back, self.alpha, self.beta
            mixed_u, mixed_w = inbox.mix((back.u, state.w))
            options = (self.step, self.order, self.batch)
            a_u, b_u = maps(problem, back, ctx, back.u, mixed_u, *options)
            a_w, b_w = maps(problem, back, ctx, state.w, mixed_w, *options)
            value = jax.tree.map(lambda v, bu, bw: alpha * (v + bu) + (1 - alpha) * bw, back.value, b_u, b_w)
            w = jax.tree.map(lambda aw, c, w, u: beta * (aw + c) + (1 - beta) * (w + u), a_w, back.source, state.w, a_u)
            return _State(Backward(back.params, back.hyper, back.links, back.source, a_u, value), w)

        def leave(before: Hyper, state: _State, ctx):
            value = add(state.back.value, enter(problem, before, ctx)[1])
            return Hyper(before.params, before.hyper, value, before.links)

        exchange = Exchange(
            send=lambda state, ctx: (state.back.u, state.w),
            receive=receive,
            weights=lambda state, ctx: reversed_weights(state.back, ctx),
        )
        return Within(Repeat(exchange, self.rounds, name="VRHGP"), start, leave)
