"""Local SGD: every client alone, without messages."""

from typing import ClassVar

import equinox as eqx
import optax

from hyperpush.data.batches import draw
from hyperpush.inner.base import InnerSolver, Learner, change, check_training, learning
from hyperpush.method import MethodInfo, as_number
from hyperpush.optimizers import Optimizer, StepSize, build
from hyperpush.problem import Problem
from hyperpush.programs import Local, Node, Repeat


class LocalSGD(InnerSolver):
    """Each client's own SGD on its own inner cost: x_i ← x_i − η ∇f_i(x_i). Nothing is sent.

    **Use it** as the baseline without cooperation, and for methods whose params are every client's own. **Avoid it**
    where clients should share params: each ends at the solution of its own cost.

    Args:
        steps: Gradient steps; 0 returns the params as they are.
        step_size: η: a number, or `hp.schedule(…)` by step. Take one below 2 / λ_max of the client's Hessian.
        batch_size: Training examples per mini-batch, drawn anew in each step; None uses all.
        optimizer: Instead of `step_size`: `hp.optimizer(…)`, or any Optax transformation.

    Raises:
        InvalidInput: An option is out of range; the message names it and what is allowed.
    """

    info: ClassVar[MethodInfo] = MethodInfo(
        network="none",
        target="inner",
        sends="nothing",
        paper="Robbins and Monro, A stochastic approximation method",
        note="the own inner cost alone",
        lossy=True,
        example={"steps": 20, "step_size": 0.1},
    )

    steps: int = eqx.field(static=True)
    step_size: StepSize | None = eqx.field(converter=as_number, default=None)
    batch_size: int | None = eqx.field(static=True, default=None)
    optimizer: Optimizer | optax.GradientTransformation | None = None

    def __check_init__(self):
        check_training(self)

    def program(self, problem: Problem) -> Node:
        transform = build(self.step_size, self.optimizer)

        def descend(state: Learner, ctx):
            updates, memory = change(problem, transform, state, draw(ctx.data.train, self.batch_size, ctx.key))
            return state.moved(optax.apply_updates(state.params, updates), memory)

        return learning(Repeat(Local(descend), self.steps, name="LocalSGD"), transform)
