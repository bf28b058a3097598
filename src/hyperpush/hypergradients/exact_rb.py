"""Exact recurrent backpropagation: directed recurrent backpropagation with the true weights of undirected links."""

from typing import ClassVar

import equinox as eqx

from hyperpush.hypergradients.base import HypergradientEstimator
from hyperpush.hypergradients.recurrent import Variant, check_recurrent, recurrent_program
from hyperpush.method import MethodInfo, Number, as_number
from hyperpush.problem import Problem
from hyperpush.programs import Node


class ExactRB(HypergradientEstimator):
    """Exact recurrent backpropagation: `DirectedRB` with the true weights of SGP's links.

    What i hears from j counts as much as i sends to j. Where every live link runs both ways at once these weights are
    known, and need no estimates (algorithm 3 of "Personalized decentralized bilevel optimization over stochastic and
    directed networks").

    **Use it** on undirected networks instead of `DirectedRB`. **Avoid it** elsewhere: it refuses directed networks.

    Args:
        steps: Terms of the series. With 0 the result is (1/n) ∂_λ F_i.
        step_size: γ, above 0: the step size of the SGP that trained, at its end.
        variant: That of the SGP that trained, `"gradient-first"` or `"gradient-after"`.
        batch_size: Training examples per mini-batch, drawn anew in each step; None uses all.

    Raises:
        InvalidInput: An option is out of range; the message names it and what is allowed.
    """

    info: ClassVar[MethodInfo] = MethodInfo(
        network="undirected",
        target="global",
        sends="one vector of the size of the params per step",
        paper="Personalized decentralized bilevel optimization over stochastic and directed networks",
        note="through the steps of SGP",
        example={"steps": 20, "step_size": 0.1},
    )

    steps: int = eqx.field(static=True)
    step_size: Number = eqx.field(converter=as_number)
    variant: Variant = eqx.field(static=True, default="gradient-first")
    batch_size: int | None = eqx.field(static=True, default=None)

    def __check_init__(self):
        check_recurrent(self)

    def program(self, problem: Problem) -> Node:
        return recurrent_program(problem, self, "reverse")
