"""The closed form of the hypergradient, with explicit Hessians."""

from dataclasses import replace
from typing import ClassVar

import equinox as eqx
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Bool, Float

from hyperpush.base.numbers import Number, as_number
from hyperpush.data.batches import full_batch
from hyperpush.hypergradients.base import HypergradientState, outer_gradient_shares, subtract_indirect
from hyperpush.hypergradients.systems import SystemSolver, report_error
from hyperpush.methods.base import MethodInfo
from hyperpush.programs import Average, Context, Node
from hyperpush.solving.common import ROUNDING
from hyperpush.task.problem import Problem


class Dense(SystemSolver):
    """The closed form of the hypergradient: explicit Hessians, and a direct solution of one linear system.

    The result of client i is

        d F̄ / dλ_i = (1/n) ∂_λ F_i − B_i (Σ_k H_k)⁻¹ (1/n) Σ_j ∂_x F_j

    with H_k = ∂²_xx f_k, B_i = ∂²_λx f_i, inner costs f and outer costs F. Every client forms its d×d Hessian at its
    own params and sends it once (Pedregosa, arXiv:1602.02355).

    **Use it** as a reference on small problems. **Avoid it** elsewhere: it keeps and sends d² numbers.

    The eigenvalues of the mean Hessian show whether the system is singular or indefinite, and give an error estimate.

    Departures from the paper:
        1. The system is solved directly, not by conjugate gradients.

    Args:
        damping: Added to the diagonal of the mean Hessian, 0 or more. Above 0 it makes a singular Hessian positive
            definite, and biases the result.
        singular: Treatment of a singular Hessian. `"refuse"` marks the result as not converged. `"minimum-norm"`
            leaves out directions without curvature; the result is not converged if the outer gradient has a part
            there. `"damping"` needs a `damping` above 0.

    Raises:
        InvalidInput: An option is out of range; the message names it and what is allowed.

    Example:
        Four clients share x = 1, the inner solution. The true hypergradient of each is −1/4.

        >>> import jax.numpy as jnp
        >>> import hyperpush as hp
        >>> task = hp.Task(
        ...     inner=lambda x, log_rate, a: (x - a) ** 2,
        ...     penalty=lambda x, log_rate: jnp.exp(log_rate) * x**2,
        ...     outer=lambda x, log_rate, b: (x - b) ** 2, params=1.0, hypers=0.0,
        ...     train=jnp.array([[1.0], [2.0], [3.0], [2.0]]), validation=jnp.zeros((4, 1)),
        ... )
        >>> network = hp.networks.RandomDirected(4)
        >>> print(hp.hypergradient(task, hp.hypergradients.Dense(), network, key=0).value)
        [-0.25 -0.25 -0.25 -0.25]
    """

    info: ClassVar[MethodInfo] = MethodInfo(
        network="server",
        target="global",
        sends="a Hessian, a vector of the size of the params and a number, once",
        matrices=True,
        paper="Pedregosa, Hyperparameter optimization with approximate gradient",
    )

    damping: Number = eqx.field(converter=as_number, default=0.0)

    def program(self, problem: Problem) -> Node:
        def get_system(state: HypergradientState, ctx: Context):
            source, _ = outer_gradient_shares(problem, state, ctx)
            hessian = problem.expansion(state.params, state.hyper, full_batch(ctx.data.train))[2]
            return (hessian, ravel_pytree(source)[0], jnp.sum(hessian**2)), jnp.ones(())

        def solve(state: HypergradientState, means: tuple[Array, Array, Array], mass, ctx: Context):
            hessian, source, squared = means
            damped = hessian + self.damping * jnp.eye(len(source), dtype=source.dtype)
            q, error, ill_posed = _solve(damped, source, jnp.sqrt(squared), self.ignores_flat)
            _, direct = outer_gradient_shares(problem, state, ctx)
            after = subtract_indirect(problem, state, direct, ravel_pytree(state.params)[1](q), ctx)
            report = report_error(problem, state, after.value, direct, q, error, ill_posed, True, ctx)
            return replace(after, report=report)

        return Average(get_system, solve, rounds=1, by="exact")


def _solve(
    hessian: Float[Array, "d d"], source: Float[Array, " d"], scale: Float[Array, ""], ignores_flat: bool
) -> tuple[Float[Array, " d"], Float[Array, ""], Bool[Array, ""]]:
    """Return the solution outside of flat directions, an estimate of its error, and True if the system is ill-posed.

    Rounding cannot tell eigenvalues below `floor` apart. `scale` is the root mean square of the norms of the clients'
    Hessians, which may be far above the norm of their mean.
    """
    values, vectors = jnp.linalg.eigh((hessian + hessian.T) / 2)
    rounding = jnp.finfo(source.dtype).eps
    floor = ROUNDING * rounding * scale
    flat = jnp.abs(values) <= floor
    along = vectors.T @ source
    q = vectors @ jnp.where(flat, 0, along / jnp.where(flat, 1, values))
    smallest = jnp.min(jnp.where(flat, jnp.inf, jnp.abs(values)))
    error = rounding * (scale * jnp.linalg.norm(q) + jnp.linalg.norm(source)) / smallest
    ill_posed = jnp.any(values < -floor)
    if not ignores_flat:
        return q, error, ill_posed | jnp.any(flat)
    # The eigenvectors, and with them the range, are known up to an angle of floor/smallest.
    outside = jnp.linalg.norm(jnp.where(flat, along, 0))
    return q, error, ill_posed | (outside > (floor / smallest + ROUNDING * rounding) * jnp.linalg.norm(source))
