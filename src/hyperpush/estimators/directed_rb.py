"""Directed recurrent backpropagation: the hyper-gradient of SGP itself, without averaging in between."""

from typing import ClassVar

import equinox as eqx

from hyperpush.estimators.recurrent import Order, check_options, recurrent_program, reversed_weights
from hyperpush.estimators.state import Declaration
from hyperpush.problem import Problem
from hyperpush.program import Node


class DirectedRB(eqx.Module):
    """v ← v + B u, u ← A u for `rounds` rounds from u = c_x, v = c_λ, along links that run against those of SGP.

    What "Cooperative personalized bilevel optimization over random directed networks" and "Personalized decentralized
    bilevel optimization over stochastic and directed networks" call HGP; `recurrent.py` has the maps A and B. `step` is
    the rate γ and `order` the form of the SGP that trained. It estimates the truncated series without bias, with noise
    from the links that does not fall with `rounds`. One round and batch serve both u and v: as v takes u from before
    its update, this adds no bias; `separate=True` uses one round and batch for each.
    """

    declares: ClassVar[Declaration] = Declaration(
        network="any whose links can run both ways: directed, time-varying",
        target="global, through the steps of SGP",
        sends="vectors of the size of the params",
        matrices=False,
        paper="Personalized decentralized bilevel optimization over stochastic and directed networks",
        needs="two-way",
    )

    rounds: int = eqx.field(static=True)
    step: float = eqx.field(static=True, converter=float)
    order: Order = eqx.field(static=True, default="gradient-first")
    batch: int | None = eqx.field(static=True, default=None)
    separate: bool = eqx.field(static=True, default=False)

    def __check_init__(self):
        check_options("DirectedRB", self.rounds, self.step, self.order, self.batch)

    def program(self, problem: Problem) -> Node:
        return recurrent_program(problem, self, reversed_weights, self.separate, "DirectedRB")
