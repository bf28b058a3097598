"""Decentralised SGD: gossip with doubly stochastic weights on undirected networks."""

from typing import Literal

import equinox as eqx
import optax
from jaxtyping import PyTree

from hyperpush.data.batches import draw
from hyperpush.errors import InvalidInput
from hyperpush.inner.step import Learner, Rate, change, check_steps, learning, optimizer
from hyperpush.problem import Problem
from hyperpush.program import Exchange, Inbox, Local, Node, Repeat, Sequence


class DSGD(eqx.Module):
    """x ← W(x − γ∇f(x)) (`"gradient-first"`) or x ← Wx − γ∇f(x) (`"gradient-after"`), W doubly stochastic.

    Lian, Zhang, Zhang, Hsieh, Zhang, Liu 2017. `rate` and `batch` as in `SGP`.
    """

    steps: int = eqx.field(static=True)
    rate: Rate = eqx.field(static=True)
    order: Literal["gradient-first", "gradient-after"] = eqx.field(static=True, default="gradient-first")
    batch: int | None = eqx.field(static=True, default=None)

    def __check_init__(self):
        check_steps("DSGD.steps", self.steps, self.batch)
        optimizer(self.rate)
        if self.order not in ("gradient-first", "gradient-after"):
            raise InvalidInput("DSGD.order", self.order, "'gradient-first' or 'gradient-after'")

    def program(self, problem: Problem) -> Node:
        transform = optimizer(self.rate)

        def moved(start: PyTree, state: Learner, ctx):
            updates, memory = change(problem, transform, state, draw(ctx.data.inner, self.batch, ctx.key))
            return state.moved(optax.apply_updates(start, updates), memory)

        def receive(state: Learner, inbox: Inbox, ctx):
            mixed = inbox.mix(state.params)
            return moved(mixed, state, ctx) if self.order == "gradient-after" else state.moved(mixed, state.memory)

        mix = Exchange(send=lambda state, ctx: state.params, receive=receive, weights="gossip")
        if self.order == "gradient-first":
            mix = Sequence(Local(lambda state, ctx: moved(state.params, state, ctx)), mix)
        return learning(Repeat(mix, self.steps, name="DSGD"), transform)
