"""Federated averaging whose clients stay near the common model."""

from dataclasses import replace
from typing import ClassVar

import equinox as eqx
import optax

from hyperpush.checks import check_integer, check_nonnegative
from hyperpush.inner.base import InnerSolver, Learner, learning
from hyperpush.inner.fedavg import averaged, local_epochs
from hyperpush.method import MethodInfo, Number, as_number
from hyperpush.optimizers import Optimizer, StepSize, build, check_optimizer
from hyperpush.personalize.baselines.near import Near
from hyperpush.problem import Problem
from hyperpush.programs import Context, Local, Node, Repeat, Sequence


class FedProx(InnerSolver):
    """Federated averaging whose clients stay near the common model.

    `FedAvg` on f_i(x) + ½·penalty·‖x − x_r‖², x_r the common model at the start of the round (Li et al.,
    arXiv:1812.06127).

    **Use it** where unlike clients take many local steps. **Avoid it** without a server.

    Departures from the paper:

    1. Every client takes part in every round, and takes all its epochs.

    Args:
        steps: Rounds with the server. With 0 nothing moves.
        step_size: η, above 0; a number or a schedule by mini-batches, for plain SGD. None needs an `optimizer`.
        epochs: Local passes over the own examples per round, at least 1.
        batch_size: Examples per mini-batch; None takes one step on all examples per epoch.
        optimizer: `hp.optimizer(…)` or an Optax transformation instead of `step_size`. It keeps its memory between
            rounds.
        penalty: 0 or more. 0 is `FedAvg`; the paper tries 0.001 to 1.

    Raises:
        InvalidInput: An option is out of range; the message names it and what is allowed.
    """

    info: ClassVar[MethodInfo] = MethodInfo(
        network="server",
        target="inner",
        sends="params",
        paper="Li et al., Federated optimization in heterogeneous networks, arXiv:1812.06127",
        example={"steps": 3, "step_size": 0.1, "penalty": 0.1},
    )

    steps: int = eqx.field(static=True)
    step_size: StepSize | None = eqx.field(converter=as_number, default=None)
    epochs: int = eqx.field(static=True, default=1)
    batch_size: int | None = eqx.field(static=True, default=None)
    optimizer: Optimizer | optax.GradientTransformation | None = None
    penalty: Number = eqx.field(converter=as_number, kw_only=True)

    def __check_init__(self):
        check_integer("FedProx.steps", self.steps, minimum=0)
        check_optimizer("FedProx", self.step_size, self.optimizer)
        check_integer("FedProx.epochs", self.epochs, minimum=1)
        check_integer("FedProx.batch_size", self.batch_size, minimum=1, optional=True)
        check_nonnegative("FedProx.penalty", self.penalty)

    def program(self, problem: Problem) -> Node:
        transform = build(self.step_size, self.optimizer)

        def train(state: Learner, ctx: Context):
            near = replace(problem, penalty=Near(self.penalty, state.params, problem.penalty))
            return local_epochs(near, transform, state, ctx, ctx.data.train, self.epochs, self.batch_size)

        body = Sequence(Local(train), averaged("server", weighted=True))
        return learning(Repeat(body, self.steps, name="FedProx"), transform)
