"""Federated averaging whose clients stay near the common model."""

import equinox as eqx

from hyperpush.checks import not_negative, whole
from hyperpush.inner.fedavg import averaged, local_epochs
from hyperpush.inner.step import Learner, Rate, check_steps, learning, optimizer
from hyperpush.personalize.recipe import distance
from hyperpush.problem import Problem
from hyperpush.program import Context, Local, Node, Repeat, Sequence


class FedProx(eqx.Module):
    """`FedAvg` with ½·`penalty`·‖x − x_round‖² added to every client's cost, x_round the common model of the round.

    Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith 2020. With `penalty` 0 it is FedAvg.
    """

    rounds: int = eqx.field(static=True)
    rate: Rate = eqx.field(static=True)
    penalty: float = eqx.field(static=True, converter=float)
    epochs: int = eqx.field(static=True, default=1)
    batch: int | None = eqx.field(static=True, default=None)

    def __check_init__(self):
        check_steps("FedProx.rounds", self.rounds, self.batch)
        optimizer(self.rate)
        whole("FedProx.epochs", self.epochs, least=1)
        not_negative("FedProx.penalty", self.penalty)

    def program(self, problem: Problem) -> Node:
        transform = optimizer(self.rate)

        def train(state: Learner, ctx: Context):
            common = state.params

            def near(params, hyper, batch):
                return problem.inner(params, hyper, batch) + distance(self.penalty, params, common)

            near_problem = Problem(near, problem.outer)
            return local_epochs(near_problem, transform, state, ctx, ctx.data.inner, self.epochs, self.batch)

        body = Sequence(Local(train), averaged("server", weighted=True))
        return learning(Repeat(body, self.rounds, name="FedProx"), transform)
