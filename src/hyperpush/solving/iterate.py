"""Shared parts of Newton's methods on exact averages: the best point so far, and the rules to accept or give up."""

from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from hyperpush.base.status import Reason
from hyperpush.programs.report import LARGEST
from hyperpush.solving.settings import norm

RUNNING = -1  # no reason to end yet
HUGE = 1e30  # stands for infinity: states and messages must be finite
DROWNED = 1e3  # a decrease below this multiple of the cost's rounding is measured by slopes
REJECTED = 20  # largest number of successive steps that do not lower the cost
TIES = 4  # the same limit if the decrease is below `DROWNED` roundings, where better points cannot be found


class Point(eqx.Module):
    """The best point so far, the same at every client, with the mean cost and gradient there."""

    params: PyTree  # the point as a pytree, as users' functions take it
    hyper: PyTree
    x: Float[Array, " d"]  # the point as a vector
    trial: Float[Array, " d"]  # the next point for all clients
    cost: Float[Array, ""]
    gradient: Float[Array, " d"]
    noise: Float[Array, ""]  # norm that rounding can give to a gradient of zero
    longest: Float[Array, ""]  # largest ‖x‖ of all points so far
    count: Int[Array, ""]  # points evaluated
    rejected: Int[Array, ""]  # number of trials rejected since the last accepted one
    reason: Int[Array, ""]
    error: Float[Array, ""]  # relative distance of x to the solution; below 0: not known
    ended: Bool[Array, ""]  # True after the root has ended the loop

    @property
    def rise(self) -> Float[Array, ""]:
        return norm(self.gradient)

    @property
    def scale(self) -> Float[Array, ""]:
        """‖x‖, but at least √eps times the largest ‖x‖ so far, because the solution may be zero."""
        return jnp.maximum(norm(self.x), jnp.sqrt(jnp.finfo(self.x.dtype).eps) * self.longest)

    def away(self, smallest: Float[Array, ""]) -> Float[Array, ""]:
        """Return a bound of the relative length of a Newton step, from the mean Hessian's smallest eigenvalue."""
        scale, rise = self.scale, self.rise
        error = rise / jnp.maximum(smallest, jnp.finfo(rise.dtype).tiny) / jnp.where(scale > 0, scale, 1)
        return jnp.where(rise > 0, jnp.where(scale > 0, jnp.minimum(error, LARGEST), LARGEST), 0)

    def gain(self, cost: Float[Array, ""], gradient: Float[Array, " d"], predicted: Float[Array, ""]) -> Any:
        """Return the decrease of the cost at the trial, estimated from slopes if rounding hides the decrease."""
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
