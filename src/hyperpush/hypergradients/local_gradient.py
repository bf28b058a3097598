"""Each client's hypergradient through its own inner problem, as if there were no others."""

from typing import ClassVar

import equinox as eqx

from hyperpush.data.batches import everything
from hyperpush.hypergradients.base import HypergradientEstimator, HypergradientState
from hyperpush.hypergradients.implicit_cg import check_solving
from hyperpush.hypergradients.local_implicit import own_hypergradient
from hyperpush.method import MethodInfo, Number, as_number
from hyperpush.problem import Problem
from hyperpush.programs import Context, Local, Node


class LocalGradient(HypergradientEstimator):
    """The hypergradient of the client's own outer cost through its own inner problem.

        d F_i(x_i*(λ_i), λ_i) / dλ_i = ∂_λ F_i − B_i H_i⁻¹ ∂_x F_i

    The system is solved by conjugate gradients (Pedregosa, arXiv:1602.02355). Nothing is sent.

    **Use it** with `LocalSGD`: as the baseline without cooperation, or with agreement on the hypers alone (CDBO-Local).
    **Avoid it** where clients share params: it takes the others' costs for zero.

    Args:
        steps: Conjugate-gradient steps, at least 1. But for rounding as many as there are eigenvalues suffice.
        damping: Added to the diagonal of H_i, 0 or more, so that it is positive definite.

    Raises:
        InvalidInput: An option is out of range; the message names it and what is allowed.
    """

    info: ClassVar[MethodInfo] = MethodInfo(
        network="none",
        target="local",
        sends="nothing",
        paper="Pedregosa, arXiv:1602.02355",
        lossy=True,
        example={"steps": 10},
    )

    steps: int = eqx.field(static=True, default=100)
    damping: Number = eqx.field(converter=as_number, default=0.0)

    def __check_init__(self):
        check_solving(self)

    def program(self, problem: Problem) -> Node:
        def estimate(state: HypergradientState, ctx: Context):
            batches = everything(ctx.data.train), everything(ctx.data.outer)
            value = own_hypergradient(problem, state.params, state.hyper, *batches, self.steps, self.damping)
            return HypergradientState(state.params, state.hyper, value, state.links)

        return Local(estimate)
