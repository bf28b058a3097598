"""Implicit differentiation by a Neumann series whose products are averaged exactly, as a server would."""

from typing import ClassVar

import equinox as eqx

from hyperpush.checks import check_integer, check_positive
from hyperpush.hypergradients.base import HypergradientEstimator
from hyperpush.hypergradients.hgp import HGP
from hyperpush.method import MethodInfo, Number, as_number
from hyperpush.problem import Problem
from hyperpush.programs import Node


class ImplicitNeumann(HypergradientEstimator):
    """Implicit differentiation by a Neumann series whose terms are averaged exactly.

        v_i = (1/n) ∂_λ F_i − B_i q,    q = η Σ_{m < steps} (I − ηH̄)^m c̄

    H̄ is the mean of the Hessians ∂²_xx f_k and c̄ that of (1/n) ∂_x F_k: as on one machine (Lorraine, Vicol and
    Duvenaud, arXiv:1911.02590). It is `HGP(steps, pushes=1, step_size=step_size, averaging="exact")`.

    **Use it** if there is a server and the Hessian is well conditioned. **Avoid it** otherwise: `ImplicitCG` takes
    fewer rounds.

    Departures from the paper:
        1. η is an option of its own; the paper takes the learning rate of training.

    Args:
        steps: Terms of the series. With 0 the result is the direct gradient (1/n) ∂_λ F_i. About κ·ln(1/ε) reach a
            relative error ε at condition number κ.
        step_size: η. Any 0 < η < 2 / λ_max(H̄) converges; 1 / λ_max(H̄) is a safe choice, which `hp.check` suggests.

    Raises:
        InvalidInput: An option is out of range; the message names it and what is allowed.

    Example:
        >>> import hyperpush as hp
        >>> task, network = hp.tasks.quadratic(5, seed=0), hp.networks.RandomDirected(5)
        >>> exact = hp.hypergradient(task, hp.hypergradients.Dense(), network, key=0).value
        >>> method = hp.hypergradients.ImplicitNeumann(steps=200, step_size=0.2)
        >>> bool(abs(hp.hypergradient(task, method, network, key=0).value - exact).max() < 1e-4)
        True
    """

    info: ClassVar[MethodInfo] = MethodInfo(
        network="server",
        target="global",
        sends="one vector of the size of the params per step",
        paper="Lorraine, Vicol and Duvenaud, Optimizing millions of hyperparameters by implicit differentiation",
        private=True,
        example={"steps": 20, "step_size": 0.2},
    )

    steps: int = eqx.field(static=True)
    step_size: Number = eqx.field(converter=as_number)

    def __check_init__(self):
        check_integer("ImplicitNeumann.steps", self.steps, minimum=0)
        check_positive("ImplicitNeumann.step_size", self.step_size)

    def program(self, problem: Problem) -> Node:
        return HGP(self.steps, pushes=1, step_size=self.step_size, averaging="exact").program(problem)
