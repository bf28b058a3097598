"""Shared parts of Newton's methods on exact averages: the best point so far, and the rule to accept or give up."""

from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from hyperpush.base.status import Reason
from hyperpush.programs.report import LARGEST
from hyperpush.solving.settings import norm

RUNNING = -1  # no reason to end yet
HUGE = 1e30  # stands for infinity: states and messages must be finite
DROWNED = 1e3  # times rounding of the cost: a smaller decrease drowns in it and is measured by slopes
REJECTED = 20  # allowed steps in a row that do not lower the cost
TIES = 4  # the same limit where the decrease drowns: rounding allows no better


class Point(eqx.Module):
    """The best point so far, the same at every client, with the mean cost and gradient there."""

    params: PyTree  # the point, as users' functions take it
    hyper: PyTree
    x: Float[Array, " d"]  # the same as a vector
    trial: Float[Array, " d"]  # the next point for all clients
    cost: Float[Array, ""]
    gradient: Float[Array, " d"]
    noise: Float[Array, ""]  # size that rounding can give a gradient of zero
    longest: Float[Array, ""]  # largest ‖x‖ of all points so far
    count: Int[Array, ""]  # points evaluated
    rejected: Int[Array, ""]  # in a row
    reason: Int[Array, ""]
    error: Float[Array, ""]  # relative distance of x to the solution; below 0: not known
    ended: Bool[Array, ""]  # True after the root has ended the loop

    @property
    def rise(self) -> Float[Array, ""]:
        return norm(self.gradient)

    @property
    def scale(self) -> Float[Array, ""]:
        """‖x‖, at least √eps times the longest point so far: the solution may be zero."""
        return jnp.maximum(norm(self.x), jnp.sqrt(jnp.finfo(self.x.dtype).eps) * self.longest)

    def away(self, smallest: Float[Array, ""]) -> Float[Array, ""]:
        """Bound the relative length of a Newton step by the smallest eigenvalue of the mean Hessian."""
        scale, rise = self.scale, self.rise
        error = rise / jnp.maximum(smallest, jnp.finfo(rise.dtype).tiny) / jnp.where(scale > 0, scale, 1)
        return jnp.where(rise > 0, jnp.where(scale > 0, jnp.minimum(error, LARGEST), LARGEST), 0)

    def gain(self, cost: Float[Array, ""], gradient: Float[Array, " d"], predicted: Float[Array, ""]) -> Any:
        """Return the decrease of the cost at the trial, from slopes where differences of costs drown in rounding."""
        slopes = -0.5 * (self.gradient + gradient) @ (self.trial - self.x)
        return jnp.where(self.drowns(predicted), slopes, self.cost - cost)

    def drowns(self, predicted: Float[Array, ""]) -> Bool[Array, ""]:
        return predicted <= DROWNED * jnp.finfo(self.x.dtype).eps * jnp.abs(self.cost)

    def verdict(self, predicted: Float[Array, ""], limit: int) -> Int[Array, ""]:
        """Return a reason to give up after a trial (too many points, or steps without a decrease), or `RUNNING`."""
        most = jnp.where(self.drowns(predicted), TIES, REJECTED)
        stuck = jnp.where(self.drowns(predicted), Reason.INACCURATE, Reason.STALLED)
        reason = jnp.where(self.count > limit, Reason.LIMIT, RUNNING)
        return jnp.where(self.rejected > most, stuck, reason).astype(jnp.int32)
