"""Judge the result of a client that tracks gradients: estimate the error, and decide if more steps would help."""

from dataclasses import replace

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from hyperpush.base.status import Reason
from hyperpush.solving.secants import Secants

PATIENCE = 200  # steps without a smaller tracked gradient after which progress counts as stalled
ROUNDING = 4  # norm that rounding can give to a tracked gradient of zero, in units of the largest term's rounding
FLAT = 10  # successive steps with the same tracked gradient after which the Hessian counts as singular
FINEST = 1e3  # smallest relative error that can be required, in rounding units
SOUND = 1e4  # largest relative error accepted if rounding or a stall ends the progress, in rounding units
ENOUGH = 4  # steps needed to measure the share of changes with negative curvature
FALLING = 0.42  # share of changes with negative curvature above which the mean Hessian counts as indefinite


class Judgment(eqx.Module):
    """A client's estimates of its errors so far, and its verdict."""

    jacobian_norm: Float[Array, ""]  # ‖B_i‖; 0 on a private task, and for an inner problem
    high: Float[Array, ""]  # norm of the largest term so far, whose rounding error remains in the sum
    error: Float[Array, ""]  # relative error of the result (of q on a private task); below 0: not known
    reason: Int[Array, ""]
    ended: Bool[Array, ""]  # True if more steps would not help
    curvature_signs: (
        Float[Array, "2"] | None
    )  # over all clients' changes: excess of negative curvatures over the share `FALLING`, and sum of the curvatures
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
        """Norm that rounding can give to a tracked gradient of zero."""
        return ROUNDING * jnp.finfo(self.high.dtype).eps ** self.precision * self.high

    def with_terms(self, *terms: Float[Array, " d"]) -> "Judgment":
        """Return the judgment that takes the rounding of these terms into account."""
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
        """Return the judgment with a verdict, from the estimated `error` and the tracked gradient's norm `rise`."""
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
        """Return True if clients moved along negative curvature, as on the way to a saddle point.

        Accelerated steps can end at a saddle point. Mixing changes the sign of single curvatures at single clients, so
        the counts are summed over all clients. The sum of the curvatures also reveals a few large negative ones.
        """
        if self.curvature_signs is None:
            return jnp.zeros((), bool)
        return (step >= ENOUGH) & ((self.curvature_signs[0] > 0) | (self.curvature_signs[1] < 0))
