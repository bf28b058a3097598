"""Federated averaging, then a little training of one's own."""

import equinox as eqx

from hyperpush.checks import whole
from hyperpush.inner.fedavg import FedAvg, local_epochs
from hyperpush.inner.step import Learner, Rate, learning, optimizer
from hyperpush.problem import Problem
from hyperpush.program import Context, Local, Node, Sequence


class FedAvgPlus(eqx.Module):
    """`first`, a `FedAvg`; then every client alone passes `epochs` times over its examples at the rate `rate`.

    Jiang, Konečný, Rush, Kannan 2019.
    """

    first: FedAvg
    rate: Rate = eqx.field(static=True)
    epochs: int = eqx.field(static=True, default=1)

    def __check_init__(self):
        optimizer(self.rate)
        whole("FedAvgPlus.epochs", self.epochs, least=0)

    def program(self, problem: Problem) -> Node:
        transform = optimizer(self.rate)

        def tune(state: Learner, ctx: Context):
            return local_epochs(problem, transform, state, ctx, ctx.data.inner, self.epochs, self.first.batch)

        return Sequence(self.first.program(problem), learning(Local(tune), transform))
