"""Exact recurrent backpropagation: directed recurrent backpropagation with the true weights of undirected links."""

from typing import ClassVar

import equinox as eqx

from hyperpush.estimators.recurrent import Order, check_options, recurrent_program
from hyperpush.estimators.state import Declaration
from hyperpush.problem import Problem
from hyperpush.program import Node


class ExactRB(eqx.Module):
    """`DirectedRB` with the true weights of SGP's links: what i hears from j counts as much as i sends to j.

    Only on undirected networks, where every live link runs both ways at once. Algorithm 3 of "Personalized
    decentralized bilevel optimization over stochastic and directed networks".
    """

    declares: ClassVar[Declaration] = Declaration(
        network="undirected, static or time-varying",
        target="global, through the steps of SGP",
        sends="vectors of the size of the params",
        matrices=False,
        paper="Personalized decentralized bilevel optimization over stochastic and directed networks",
        needs="undirected",
    )

    rounds: int = eqx.field(static=True)
    step: float = eqx.field(static=True, converter=float)
    order: Order = eqx.field(static=True, default="gradient-first")
    batch: int | None = eqx.field(static=True, default=None)

    def __check_init__(self):
        check_options("ExactRB", self.rounds, self.step, self.order, self.batch)

    def program(self, problem: Problem) -> Node:
        return recurrent_program(problem, self, "reverse", False, "ExactRB")
