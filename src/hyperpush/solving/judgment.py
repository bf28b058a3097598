"""The verdict of a client that tracks gradients: the error of its result, and the use of more steps."""

from dataclasses import replace

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from hyperpush.base.status import Reason
from hyperpush.solving.secants import Secants

PATIENCE = 200  # steps without a smaller tracked gradient: no more progress
ROUNDING = 4  # times the rounding of the largest terms: size that rounding can give a tracked gradient of zero
FLAT = 10  # steps in a row with the same tracked gradient: the Hessian is singular
FINEST = 1e3  # times rounding: the smallest relative error that is required
SOUND = 1e4  # times rounding: the largest relative error accepted where rounding or a stall ends the progress
ENOUGH = 4  # steps needed to measure a share
FALLING = 0.42  # share of changes with negative curvature above which the mean Hessian counts as indefinite


class Judgment(eqx.Module):
    """A client's estimates of its errors so far, and its verdict."""

    jacobian_norm: Float[Array, ""]  # ‖B_i‖; 0 on a private task, and for an inner problem
    high: Float[Array, ""]  # size of the largest term so far: its rounding error remains
    error: Float[Array, ""]  # relative error of the result, on a private task that of q; below 0: not known
    reason: Int[Array, ""]
    ended: Bool[Array, ""]  # True if more steps would not help
    curvature_signs: (
        Float[Array, "2"] | None
    )  # of all clients' changes: excess of negative curvatures over the share `FALLING`, and the sum of the curvatures
    precision: float = eqx.field(static=True)  # accuracy of products, as a power of the rounding unit
    memory: float = eqx.field(
        static=True
    )  # share of `curvature_signs` that the next step keeps: 1 where the Hessian is constant

    @staticmethod
    def start(
        jacobian_norm: Float[Array, ""],
        source: Float[Array, " d"],
        precision: float,
        curvature_signs: bool,
        memory: float = 1.0,
    ) -> "Judgment":
        counts = jnp.zeros(2, source.dtype) if curvature_signs else None
        unknown, limit = -jnp.ones((), source.dtype), jnp.asarray(Reason.LIMIT, jnp.int32)
        no = jnp.zeros((), bool)
        return Judgment(jacobian_norm, jnp.linalg.norm(source), unknown, limit, no, counts, precision, memory)

    @property
    def floor(self) -> Float[Array, ""]:
        """The size that rounding can give a tracked gradient of zero."""
        return ROUNDING * jnp.finfo(self.high.dtype).eps ** self.precision * self.high

    def with_terms(self, *terms: Float[Array, " d"]) -> "Judgment":
        """Return the judgment after these terms were added up."""
        return replace(self, high=jnp.max(jnp.stack([self.high, *map(jnp.linalg.norm, terms)])))

    def after_step(self, slope: Float[Array, " d"], product: Float[Array, " d"], secants: Secants | None) -> "Judgment":
        """Return the judgment with the terms of a step and the curvature along it."""
        judgment = self.with_terms(slope, product)
        if self.curvature_signs is None or secants is None:
            return judgment
        found = secants.latest
        seen = jnp.stack([(found < 0) - FALLING * (found != 0), found])
        return replace(judgment, curvature_signs=self.memory * self.curvature_signs + seen)

    def conclude(
        self,
        error: Float[Array, ""],
        rise: Float[Array, ""],
        secants: Secants,
        step: Int[Array, ""],
        tolerance: float | Float[Array, ""],
    ) -> "Judgment":
        """Return the verdict at this error and this size of the tracked gradient."""
        eps = jnp.finfo(rise.dtype).eps
        limited, stalled = rise <= self.floor, secants.since >= PATIENCE
        right = (error <= jnp.maximum(tolerance, FINEST * eps)) | ((limited | stalled) & (error <= SOUND * eps))
        saddle, ill = right & self._is_falling(step), secants.flat >= FLAT
        reason = jnp.select(
            [saddle, right, ill, limited, stalled],
            [Reason.ILL_POSED, Reason.TOLERANCE, Reason.ILL_POSED, Reason.INACCURATE, Reason.STALLED],
            Reason.LIMIT,
        )
        reason, ended = jnp.asarray(reason, jnp.int32), right | ill | limited | stalled
        return replace(self, error=error, reason=reason, ended=ended)

    def _is_falling(self, step: Int[Array, ""]) -> Bool[Array, ""]:
        """Return True if clients came along negative curvature, as to a saddle, where accelerated steps can end.

        Mixing turns the signs of single changes at single clients, so the counts are summed over all. The sum of the
        curvatures also reveals a few changes along a large negative one.
        """
        if self.curvature_signs is None:
            return jnp.zeros((), bool)
        return (step >= ENOUGH) & ((self.curvature_signs[0] > 0) | (self.curvature_signs[1] < 0))
