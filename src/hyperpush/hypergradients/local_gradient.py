"""Each client's hypergradient through its own inner problem, as if there were no others."""

from dataclasses import replace
from typing import ClassVar

import equinox as eqx

from hyperpush.hypergradients.implicit import Implicit
from hyperpush.hypergradients.local_implicit import own_hypergradient
from hyperpush.programs import Context, HypergradientState, Local, MethodInfo, Node, Problem, everything


class LocalGradient(Implicit):
    """The hypergradient of the client's own outer cost through its own inner problem.

        d F_i(x_i*(λ_i), λ_i) / dλ_i = ∂_λ F_i − B_i H_i⁻¹ ∂_x F_i

    The system is solved by conjugate gradients (Pedregosa, arXiv:1602.02355). Nothing is sent.

    **Use it** with `LocalSGD`: as the baseline without cooperation, or with agreement on the hypers alone (CDBO-Local).
    **Avoid it** where clients share params: it takes the others' costs for zero.

    Departures from the paper:
        1. The number of steps is fixed, instead of a tolerance that shrinks over the outer steps.
        2. Directions of negative curvature are left alone.

    Args:
        steps: Conjugate-gradient steps, at least 1. But for rounding as many as there are different eigenvalues
            suffice; further ones change nothing.
        damping: Added to the diagonal of H_i, 0 or more. Above 0 it makes a singular Hessian positive definite, and
            biases the result.

    Raises:
        InvalidInput: An option is out of range; the message names it and what is allowed.

    Example:
        >>> import hyperpush as hp
        >>> task, network = hp.tasks.quadratic(5, seed=0), hp.networks.RandomDirected(5)
        >>> hp.check(task, hp.hypergradients.LocalGradient(steps=4), network, key=0).passed
        True
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

    def program(self, problem: Problem) -> Node:
        def estimate(state: HypergradientState, ctx: Context) -> HypergradientState:
            batches = everything(ctx.data.train), everything(ctx.data.outer)
            value = own_hypergradient(problem, state.params, state.hyper, *batches, self.steps, self.damping)
            return replace(state, value=value)

        return Local(estimate)
