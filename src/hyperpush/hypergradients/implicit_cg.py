"""Implicit differentiation by conjugate gradients with exact averages of products, as on a server."""

from typing import ClassVar

import equinox as eqx
from jax.flatten_util import ravel_pytree

from hyperpush.base.checks import check_positive
from hyperpush.base.numbers import Number, as_number
from hyperpush.hypergradients.base import HypergradientState, outer_gradient_shares
from hyperpush.hypergradients.implicit import Implicit, Solving, finish_solving, solve_together, start_solving
from hyperpush.methods.base import MethodInfo
from hyperpush.programs import Context, Node, Scope
from hyperpush.task.problem import Problem


class ImplicitCG(Implicit):
    """Implicit differentiation by conjugate gradients with exact averages of products.

    The result of client i, and the linear system for q, are

        v_i = (1/n) ∂_λ F_i − B_i q,    (Σ_k H_k) q = (1/n) Σ_j ∂_x F_j

    with H_k = ∂²_xx f_k, B_i = ∂²_λx f_i, inner costs f and outer costs F. The system is solved as on one machine
    (Pedregosa, arXiv:1602.02355). Each step takes the mean of the clients' products H_k p with the direction p; each
    client computes its product at its own params. A second, random right-hand side reveals singular directions that the
    first one does not contain. `singular="minimum-norm"` omits it and halves the messages.

    **Use it** with a server. **Avoid it** without one, and with mini-batches, which conjugate gradients do not
    tolerate.

    Departures from the paper:
        1. The Hessian's products are means over clients; the paper uses one machine.
        2. The tolerance stays the same in all outer steps; in the paper it shrinks.

    Args:
        steps: Limit of iterations, at least 1. Up to rounding, the number of distinct eigenvalues suffices. About
            √κ·ln(2/ε)/2 steps reach a relative error ε at condition number κ.
        damping: Added to the diagonal of the mean Hessian, 0 or more. Above 0 it makes a singular Hessian positive
            definite, and biases the result.
        tolerance: Estimated relative error of q at which to end, above 0. None takes all `steps`. The status compares
            the error of every v_i with twice the tolerance. With None it uses 1e-5 in float64 and 1e-3 in float32.
        singular: Treatment of a singular Hessian. `"refuse"` marks the result as not converged. `"minimum-norm"`
            leaves out directions without curvature; the result is not converged if the outer gradient has a part
            there. `"damping"` needs a `damping` above 0.

    Raises:
        InvalidInput: An option is out of range; the message names it and what is allowed.

    Example:
        Four params: four steps of conjugate gradients are exact.

        >>> import hyperpush as hp
        >>> task, network = hp.tasks.quadratic(5, seed=0), hp.networks.RandomDirected(5)
        >>> exact = hp.hypergradient(task, hp.hypergradients.Dense(), network, key=0).value
        >>> found = hp.hypergradient(task, hp.hypergradients.ImplicitCG(steps=4), network, key=0).value
        >>> bool(abs(found - exact).max() < 1e-4)
        True
    """

    info: ClassVar[MethodInfo] = MethodInfo(
        network="server",
        target="global",
        sends="two vectors of the size of the params, and two numbers, per step",
        paper="Pedregosa, Hyperparameter optimization with approximate gradient",
        example={"steps": 10},
    )

    tolerance: Number | None = eqx.field(converter=as_number, default=None)

    def __check_init__(self):
        check_positive("ImplicitCG.tolerance", self.tolerance, optional=True)

    def program(self, problem: Problem) -> Node:
        def start(state: HypergradientState, ctx: Context) -> Solving:
            source, _ = outer_gradient_shares(problem, state, ctx)
            return start_solving(problem, self, state, ravel_pytree(source)[0][None], ctx)

        def finish(before: HypergradientState, state: Solving, ctx: Context) -> HypergradientState:
            _, direct = outer_gradient_shares(problem, before, ctx)
            return finish_solving(problem, before, direct, state.system(0), state.probe, ctx, self.tolerance)

        return Scope(solve_together(problem, self, self.tolerance), start, finish)
