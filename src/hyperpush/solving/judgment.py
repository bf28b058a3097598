"""The verdict of a client that tracks gradients: how good its result is, and whether more steps would help."""

from dataclasses import replace

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from hyperpush.base.status import Reason
from hyperpush.solving.secants import Secants

PATIENCE = 200  # steps without a smaller tracked gradient: no more progress
ROUNDING = 4  # times the rounding of the largest terms: what is left of a tracked gradient of zero
FLAT = 10  # steps in a row through which the tracked gradient stays the same: the Hessian is singular
FINEST = 1e3  # times rounding: no smaller relative error is asked for
SOUND = 1e4  # times rounding: a relative error that is right where rounding allows no better
ENOUGH = 4  # steps that make a share
FALLING = 0.42  # share of all clients' changes that go along negative curvature: the mean Hessian has some


class Judgment(eqx.Module):
    """A client's estimates of its errors so far, and its verdict."""

    jacobian_norm: Float[Array, ""]  # ‖B_i‖; 0 on a private task, and for an inner problem
    high: Float[Array, ""]  # the largest of all terms so far, whose rounding stays
    error: Float[Array, ""]  # of the result, relative; on a private task of q. Below 0: not known
    reason: Int[Array, ""]
    ended: Bool[Array, ""]  # whether more steps would bring nothing
    curvature_signs: (
        Float[Array, "2"] | None
    )  # of all clients' changes: how many too many fell, and the sum of their curvatures
    precision: float = eqx.field(static=True)  # the power of the rounding unit to which products are right
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
        """The size that rounding may leave of a tracked gradient of zero."""
        return ROUNDING * jnp.finfo(self.high.dtype).eps ** self.precision * self.high

    def with_terms(self, *terms: Float[Array, " d"]) -> "Judgment":
        """After these terms were added up."""
        return replace(self, high=jnp.max(jnp.stack([self.high, *map(jnp.linalg.norm, terms)])))

    def after_step(self, slope: Float[Array, " d"], product: Float[Array, " d"], secants: Secants | None) -> "Judgment":
        """With the terms of a step, and the curvature that it saw."""
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
        """The verdict at this error and this size of the tracked gradient."""
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
        """True if the clients came here along negative curvature: to a saddle, where accelerated steps can end.

        Mixing turns the signs of single changes and clients, so all count them together. The sum of the curvatures sees
        few changes along a large negative one.
        """
        if self.curvature_signs is None:
            return jnp.zeros((), bool)
        return (step >= ENOUGH) & ((self.curvature_signs[0] > 0) | (self.curvature_signs[1] < 0))
