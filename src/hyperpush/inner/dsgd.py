"""Decentralized SGD (DSGD): gossip with doubly stochastic weights on undirected networks."""

from typing import ClassVar, Literal

import equinox as eqx
import optax
from jaxtyping import PyTree

from hyperpush.data.batches import draw
from hyperpush.inner.base import InnerSolver, Learner, change, check_training, learning
from hyperpush.method import MethodInfo, as_number
from hyperpush.optimizers import Optimizer, StepSize, build
from hyperpush.problem import Problem
from hyperpush.programs import Exchange, Inbox, Local, Node, Repeat, Sequence


class DSGD(InnerSolver):
    """Decentralized SGD: in every round a gradient step and a mean with the neighbors.

    With the doubly stochastic weights W of the round's links (Lian et al., arXiv:1705.09056):

        gradient-first:  x ← W(x − η ∇f(x))
        gradient-after:  x ← Wx − η ∇f(x)

    With a constant η clients end about η away from the common solution, and from each other. A falling one converges.

    **Use it** on undirected networks. **Avoid it** elsewhere: it refuses directed networks, which `SGP` can use.

    Args:
        steps: Rounds, each with one gradient step; 0 returns the params as they are.
        step_size: η: a number, or `hp.schedule(…)` by step. Take one below 2 / λ_max of the Hessians.
        variant: `"gradient-first"` or `"gradient-after"`.
        batch_size: Training examples per mini-batch, drawn anew in each step; None uses all.
        optimizer: Instead of `step_size`: `hp.optimizer(…)`, or any Optax transformation.

    Raises:
        InvalidInput: An option is out of range; the message names it and what is allowed.
    """

    info: ClassVar[MethodInfo] = MethodInfo(
        network="undirected",
        target="inner",
        sends="one vector of the size of the params per step",
        paper="Lian et al., arXiv:1705.09056",
        example={"steps": 20, "step_size": 0.1},
    )

    steps: int = eqx.field(static=True)
    step_size: StepSize | None = eqx.field(converter=as_number, default=None)
    variant: Literal["gradient-first", "gradient-after"] = eqx.field(static=True, default="gradient-first")
    batch_size: int | None = eqx.field(static=True, default=None)
    optimizer: Optimizer | optax.GradientTransformation | None = None

    def __check_init__(self):
        check_training(self)

    def program(self, problem: Problem) -> Node:
        transform = build(self.step_size, self.optimizer)

        def moved(start: PyTree, state: Learner, ctx):
            updates, memory = change(problem, transform, state, draw(ctx.data.train, self.batch_size, ctx.key))
            return state.moved(optax.apply_updates(start, updates), memory)

        def receive(state: Learner, inbox: Inbox, ctx):
            mixed = inbox.mix(state.params)
            return moved(mixed, state, ctx) if self.variant == "gradient-after" else state.moved(mixed, state.memory)

        mix = Exchange(send=lambda state, ctx: state.params, receive=receive, weights="gossip")
        if self.variant == "gradient-first":
            mix = Sequence(Local(lambda state, ctx: moved(state.params, state, ctx)), mix)
        return learning(Repeat(mix, self.steps, name="DSGD"), transform)
