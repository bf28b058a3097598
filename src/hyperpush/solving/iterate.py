"""What Newton's methods on exact averages share: the point that is best so far, and when it counts as solved."""

from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from hyperpush.base.status import Reason
from hyperpush.programs.report import LARGEST
from hyperpush.solving.settings import norm

RUNNING = -1  # no reason to end yet
HUGE = 1e30  # stands for infinity: states and messages must be finite
DROWNED = 1e3  # times rounding of the cost: a smaller decrease drowns in it, and only slopes can tell
REJECTED = 20  # steps in a row that lower nothing
TIES = 4  # of these where the decrease drowns: rounding allows no better


class Point(eqx.Module):
    """The best point so far, the same at every client, and what is known of the mean cost there."""

    params: PyTree  # the point, as users' functions take it
    hyper: PyTree
    x: Float[Array, " d"]  # the same as a vector
    trial: Float[Array, " d"]  # where everybody looks next
    cost: Float[Array, ""]
    gradient: Float[Array, " d"]
    noise: Float[Array, ""]  # what rounding may leave of a gradient of zero
    longest: Float[Array, ""]  # ‖x‖ of all points so far
    count: Int[Array, ""]  # points that were looked at
    rejected: Int[Array, ""]  # in a row
    reason: Int[Array, ""]
    error: Float[Array, ""]  # how far x is from the solution, relative; below 0: not known
    ended: Bool[Array, ""]  # whether the root has ended the loop

    @property
    def rise(self) -> Float[Array, ""]:
        return norm(self.gradient)

    @property
    def scale(self) -> Float[Array, ""]:
        """‖x‖; where the solution is zero, as much of the longest point as rounding lets us see."""
        return jnp.maximum(norm(self.x), jnp.sqrt(jnp.finfo(self.x.dtype).eps) * self.longest)

    def away(self, smallest: Float[Array, ""]) -> Float[Array, ""]:
        """The length of a Newton step at most, relative, from the smallest eigenvalue of the mean Hessian."""
        scale, rise = self.scale, self.rise
        error = rise / jnp.maximum(smallest, jnp.finfo(rise.dtype).tiny) / jnp.where(scale > 0, scale, 1)
        return jnp.where(rise > 0, jnp.where(scale > 0, jnp.minimum(error, LARGEST), LARGEST), 0)

    def gain(self, cost: Float[Array, ""], gradient: Float[Array, " d"], predicted: Float[Array, ""]) -> Any:
        """How much lower the cost is at the trial, by slopes where differences of costs drown in rounding."""
        slopes = -0.5 * (self.gradient + gradient) @ (self.trial - self.x)
        return jnp.where(self.drowns(predicted), slopes, self.cost - cost)

    def drowns(self, predicted: Float[Array, ""]) -> Bool[Array, ""]:
        return predicted <= DROWNED * jnp.finfo(self.x.dtype).eps * jnp.abs(self.cost)

    def verdict(self, predicted: Float[Array, ""], limit: int) -> Int[Array, ""]:
        """A reason to give up after a trial: too many points, or steps that lower nothing."""
        most = jnp.where(self.drowns(predicted), TIES, REJECTED)
        stuck = jnp.where(self.drowns(predicted), Reason.INACCURATE, Reason.STALLED)
        reason = jnp.where(self.count > limit, Reason.LIMIT, RUNNING)
        return jnp.where(self.rejected > most, stuck, reason).astype(jnp.int32)
