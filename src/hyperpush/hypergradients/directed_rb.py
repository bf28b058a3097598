"""Directed recurrent backpropagation: the hypergradient of SGP itself, without averaging in between."""

from typing import ClassVar

import equinox as eqx

from hyperpush.hypergradients.base import HypergradientEstimator
from hyperpush.hypergradients.recurrent import Variant, check_recurrent, recurrent_program, reversed_weights
from hyperpush.method import MethodInfo, Number, as_number
from hyperpush.problem import Problem
from hyperpush.programs import Node


class DirectedRB(HypergradientEstimator):
    """Directed recurrent backpropagation: back through the steps of SGP, along links that run against its own.

    From u = c_x and v = c_λ, `steps` times v ← v + B u, u ← A u, with the maps A and B of `recurrent.py`: the series
    of the fixed point of SGP's expected step. Several papers call it HGP ("Personalized decentralized bilevel
    optimization over stochastic and directed networks", "Cooperative personalized bilevel optimization over random
    directed networks"). It estimates the truncated series without bias, with noise from the links that does not fall
    with `steps`.

    **Use it** on directed or changing networks whose links can also carry messages back, after training with
    `SGP(observe=True)`. **Avoid it** if links run one way only, or if γ is large: the target is O(γ) away from the
    hypergradient of the common solution.

    Args:
        steps: Terms of the series. With 0 the result is (1/n) ∂_λ F_i.
        step_size: γ, above 0: the step size of the SGP that trained, at its end.
        variant: That of the SGP that trained, `"gradient-first"` or `"gradient-after"`.
        batch_size: Training examples per mini-batch, drawn anew in each step; None uses all.
        independent_batches: Take one round and mini-batch for u and another for v. Sharing them adds no bias, as v
            takes u from before its update.

    Raises:
        InvalidInput: An option is out of range; the message names it and what is allowed.
    """

    info: ClassVar[MethodInfo] = MethodInfo(
        network="two-way",
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
    independent_batches: bool = eqx.field(static=True, default=False)

    def __check_init__(self):
        check_recurrent(self)

    def program(self, problem: Problem) -> Node:
        return recurrent_program(problem, self, reversed_weights, self.independent_batches)
