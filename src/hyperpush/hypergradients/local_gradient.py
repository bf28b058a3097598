"""Hypergradients of each client through its own inner problem, without the other clients."""

from typing import ClassVar

import equinox as eqx
from jax.flatten_util import ravel_pytree

from hyperpush.data.batches import full_batch
from hyperpush.hypergradients.base import HypergradientState, outer_gradients
from hyperpush.hypergradients.implicit import Implicit, System, finish_solving
from hyperpush.hypergradients.local_implicit import solve_own
from hyperpush.methods.base import MethodInfo
from hyperpush.programs import Context, Local, Node
from hyperpush.task.problem import Problem


class LocalGradient(Implicit):
    """The hypergradient of the client's own outer cost through its own inner problem.

    The result of client i, at its own inner solution x_i*(λ_i), is

        d F_i(x_i*(λ_i), λ_i) / dλ_i = ∂_λ F_i − B_i H_i⁻¹ ∂_x F_i

    with H_i = ∂²_xx f_i, B_i = ∂²_λx f_i, inner cost f_i and outer cost F_i. The system is solved by conjugate
    gradients (Pedregosa, arXiv:1602.02355). Clients send no messages. A second, random right-hand side reveals singular
    directions that the first one does not contain. `singular="minimum-norm"` omits it and halves the products.

    **Use it** with `LocalSGD`: as the baseline without cooperation, or with agreement on the hypers alone (CDBO-Local).
    **Avoid it** where clients share params: it ignores the other clients' costs.

    Departures from the paper:
        1. The number of steps is fixed, instead of a tolerance that shrinks over the outer steps.
        2. It ends at a direction of zero or negative curvature, and the status reports it.

    Args:
        steps: Conjugate-gradient steps, at least 1. Up to rounding, the number of distinct eigenvalues suffices;
            further steps change nothing.
        damping: Added to the diagonal of H_i, 0 or more. Above 0 it makes a singular Hessian positive definite, and
            biases the result.
        singular: Treatment of a singular Hessian. `"refuse"` marks the result as not converged. `"minimum-norm"`
            leaves out directions without curvature; the result is not converged if the outer gradient has a part
            there. `"damping"` needs a `damping` above 0.

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
            along_x, along_hyper = outer_gradients(problem, state, ctx)
            right = ravel_pytree(along_x)[0]
            probe = self.start_probe(problem, right.size, right.dtype, ctx)
            systems = [System.start(right, self.steps), *([] if probe is None else [probe])]
            own = state.params, state.hyper, full_batch(ctx.data.train)
            system, *rest = solve_own(problem, *own, systems, self.steps, self.damping)
            return finish_solving(problem, state, along_hyper, system, rest[0] if rest else None, ctx)

        return Local(estimate)
