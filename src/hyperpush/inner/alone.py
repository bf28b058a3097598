"""Every client on its own: no messages."""

import equinox as eqx
import optax

from hyperpush.data.batches import draw
from hyperpush.inner.step import Learner, Rate, change, check_steps, learning, optimizer
from hyperpush.problem import Problem
from hyperpush.program import Local, Node, Repeat


class Alone(eqx.Module):
    """`steps` steps of SGD (or any Optax transformation) of each client on its own inner cost."""

    steps: int = eqx.field(static=True)
    rate: Rate = eqx.field(static=True)
    batch: int | None = eqx.field(static=True, default=None)

    def __check_init__(self):
        check_steps("Alone.steps", self.steps, self.batch)
        optimizer(self.rate)

    def program(self, problem: Problem) -> Node:
        transform = optimizer(self.rate)

        def descend(state: Learner, ctx):
            updates, memory = change(problem, transform, state, draw(ctx.data.inner, self.batch, ctx.key))
            return state.moved(optax.apply_updates(state.params, updates), memory)

        return learning(Repeat(Local(descend), self.steps, name="Alone"), transform)
