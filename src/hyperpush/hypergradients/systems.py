"""Convergence reports of estimators that solve a linear system with a Hessian, which may be singular or indefinite."""

from dataclasses import replace
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Bool, Float, PyTree

from hyperpush.base.checks import check_nonnegative, is_number
from hyperpush.base.errors import InvalidInput
from hyperpush.base.numbers import Number
from hyperpush.base.status import Reason, Status
from hyperpush.data.batches import full_batch
from hyperpush.hypergradients.base import HypergradientEstimator, HypergradientState
from hyperpush.programs import Context
from hyperpush.programs.report import LARGEST, Report
from hyperpush.solving.settings import largest_stretch, norm
from hyperpush.task.problem import Problem

Singular = Literal["refuse", "minimum-norm", "damping"]


class _HasDamping:
    """Declare the type of `damping`; as a field of a module it would become every estimator's first argument."""

    damping: Number


class SystemSolver(HypergradientEstimator, _HasDamping):
    """An estimator that solves a linear system with a Hessian, which may be singular.

    `"refuse"` marks a singular result as ill-posed. `"minimum-norm"` leaves out directions without curvature; the
    result is ill-posed if the outer gradient has a part there. `"damping"` adds `damping` to the diagonal; a damping
    above 0 implies it. Negative curvature is always ill-posed.
    """

    singular: Singular = eqx.field(static=True, default="refuse", kw_only=True)

    def __check_init__(self):
        name, damping = type(self).__name__, self.damping
        check_nonnegative(f"{name}.damping", damping)
        if not is_number(damping):  # a traced number was checked before tracing
            return
        if damping == 0 and self.singular == "damping":
            raise InvalidInput(f"{name}.damping", damping, 'a number above 0 for singular="damping"')
        if damping > 0 and self.singular == "minimum-norm":
            raise InvalidInput(f"{name}.damping", damping, '0 for singular="minimum-norm"')

    @property
    def ignores_flat(self) -> bool:
        """True if directions without curvature are left out."""
        return self.singular == "minimum-norm"

    def status(self, states: HypergradientState) -> Status:
        used = "damping" if not is_number(self.damping) or self.damping > 0 else self.singular
        return replace(super().status(states), singular=used)


def default_tolerance(dtype: Any) -> float:
    """Return the default of the largest accepted relative error."""
    return 1e-5 if dtype == jnp.float64 else 1e-3


def norm_of_jacobian(problem: Problem, state: HypergradientState, ctx: Context) -> Float[Array, ""]:
    """Return an estimate of ‖B_i‖ with a safety margin, by power iteration on B_iᵀB_i."""
    vector, back = ravel_pytree(state.params)
    examples = full_batch(ctx.data.train)

    def multiply(q: Float[Array, " d"]) -> PyTree:
        return problem.jacobian_product(state.params, state.hyper, examples, back(q))

    def multiply_transposed(image: PyTree) -> Float[Array, " d"]:
        return jax.vjp(multiply, vector)[1](image)[0]

    return largest_stretch(multiply, multiply_transposed, vector, ctx.key)


def scale_of(
    jacobian_norm: Float[Array, ""], direct: PyTree, value: PyTree, q: Float[Array, " d"], share: float | None = None
) -> Float[Array, ""]:
    """Return the norm of v_i = direct − B_i q, to which its error is relative; `jacobian_norm` is ‖B_i‖.

    The result is at least `share` times the size of the two terms. None takes √ε, with rounding unit ε. Then the error
    is relative to the terms if these cancel in more than half of the digits.
    """
    least = jnp.sqrt(jnp.finfo(q.dtype).eps) if share is None else share
    return jnp.maximum(norm(value), least * (norm(direct) + jacobian_norm * norm(q)))


def relative_error(
    jacobian_norm: Float[Array, ""], scale: Float[Array, ""], away: Float[Array, ""]
) -> Float[Array, ""]:
    """Return the relative error of v_i for an error `away` of q: ‖B_i‖·away over the scale of v_i."""
    error = jacobian_norm * away
    return jnp.where(scale > 0, jnp.minimum(error / jnp.where(scale > 0, scale, 1), LARGEST), jnp.sign(error) * LARGEST)


def report_error(
    problem: Problem,
    before: HypergradientState,
    value: PyTree,
    direct: PyTree,
    q: Float[Array, " d"],
    error: Float[Array, ""],
    ill_posed: Bool[Array, ""],
    ended: Bool[Array, ""] | bool,
    ctx: Context,
    tolerance: Number | None = None,
) -> Report:
    """Return the report of v_i = direct − B_i q for an error of about `error` in q.

    `ended` is False if the solver reached its step limit. On a private problem, noise makes the error unknown.
    """
    if problem.private:
        return Report.of(Reason.FIXED_LENGTH)
    jacobian_norm = norm_of_jacobian(problem, before, ctx)
    relative = relative_error(jacobian_norm, scale_of(jacobian_norm, direct, value, q), error)
    accepted = default_tolerance(q.dtype) if tolerance is None else 2 * tolerance
    short = jnp.where(ended, Reason.INACCURATE, Reason.LIMIT)
    reason = jnp.where(ill_posed, Reason.ILL_POSED, jnp.where(relative <= accepted, Reason.TOLERANCE, short))
    return Report.of(reason, jnp.where(ill_posed, -1, relative))
