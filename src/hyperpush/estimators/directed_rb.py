"""Directed recurrent backpropagation: the hyper-gradient of SGP itself, without averaging in between."""

from typing import ClassVar

import equinox as eqx

from hyperpush.estimators.recurrent import Backward, Order, add, check_options, enter, maps, reversed_weights
from hyperpush.estimators.state import Declaration, Hyper
from hyperpush.problem import Problem
from hyperpush.program import Exchange, Inbox, Node, Repeat, Sequence, Within


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


class ExactRB(eqx.Module):
    """The same with the true weights of the links that SGP uses: what i hears from j counts as much as i sends to j.

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


def recurrent_program(problem: Problem, options: DirectedRB | ExactRB, weights, separate: bool, name: str) -> Node:
    """The way back, with the given weights for what is heard."""

    def step(state: Backward, inbox: Inbox, ctx, move: bool, collect: bool) -> Backward:
        onward, along = maps(
            problem, state, ctx, state.u, inbox.mix(state.u), options.step, options.order, options.batch
        )
        value = add(state.value, along) if collect else state.value
        return Backward(state.params, state.hyper, state.links, state.source, onward if move else state.u, value)

    def exchange(move: bool, collect: bool) -> Exchange:
        return Exchange(
            send=lambda state, ctx: state.u,
            receive=lambda state, inbox, ctx: step(state, inbox, ctx, move, collect),
            weights=weights,
        )

    body = Sequence(exchange(False, True), exchange(True, False)) if separate else exchange(True, True)

    def leave(before: Hyper, state: Backward, ctx) -> Hyper:
        return Hyper(before.params, before.hyper, add(state.value, enter(problem, before, ctx)[1]), before.links)

    return Within(Repeat(body, options.rounds, name=name), lambda state, ctx: enter(problem, state, ctx)[0], leave)
