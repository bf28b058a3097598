"""Implicit differentiation by a Neumann series whose products are averaged exactly, as a server would."""

from typing import ClassVar

import equinox as eqx

from hyperpush.checks import positive, whole
from hyperpush.estimators.hgp import HGP
from hyperpush.estimators.state import Declaration
from hyperpush.problem import Problem
from hyperpush.program import Node


class ImplicitNeumann(eqx.Module):
    """(1/n)∂_λF_i − B_i q with q = η Σ_{m < order} (I − ηH̄)^m c̄, η = `step`, where H̄ and c̄ are means over clients.

    H̄ of ∂²_xx f_k, c̄ of (1/n)∂_xF_k. Implicit differentiation as on one machine (Lorraine, Vicol, Duvenaud 2020), with
    exact averages; converges for η below 2/λ_max(H̄). It is `HGP(order, step=step, averaging="exact")`.
    """

    declares: ClassVar[Declaration] = Declaration(
        network="a server, or any that can average exactly",
        target="global: everybody's mean outer cost",
        sends="vectors of the size of the params",
        matrices=False,
        paper="Lorraine, Vicol and Duvenaud, Optimizing millions of hyperparameters by implicit differentiation",
    )

    order: int = eqx.field(static=True)
    step: float = eqx.field(static=True, converter=float)

    def __check_init__(self):
        whole("ImplicitNeumann.order", self.order, least=0)
        positive("ImplicitNeumann.step", self.step)

    def program(self, problem: Problem) -> Node:
        return HGP(self.order, pushes=1, step=self.step, averaging="exact").program(problem)
