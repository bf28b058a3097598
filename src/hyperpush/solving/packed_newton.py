"""Newton's method in which one message holds the cost, the gradient and the whole Hessian."""

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from hyperpush.base.status import Reason
from hyperpush.solving.common import ROUNDING, choose
from hyperpush.solving.iterate import HUGE, RUNNING, Point
from hyperpush.solving.settings import norm


class Packed(Point):
    """The best point so far, with the eigenvalues and eigenvectors of the mean Hessian at this point."""

    values: Float[Array, " d"]
    vectors: Float[Array, "d d"]
    damping: Float[Array, ""]
    predicted: Float[Array, ""]  # expected decrease of the cost at the trial
    floor: Float[Array, ""]  # smaller curvatures count as zero

    def look(self, means: tuple[Any, ...], tolerance: Any, limit: int) -> "Packed":
        """Return the state after the means of cost, gradient and Hessian at the trial have arrived."""
        cost, gradient, upper, squares, spread = means
        rounding, fresh = jnp.finfo(gradient.dtype).eps, self.count <= 0
        noise = 2 * rounding * jnp.sqrt(squares)
        values, vectors = jnp.linalg.eigh(unpack(upper, gradient.size))
        floor = ROUNDING * rounding * jnp.sqrt(spread)
        lower = self.gain(cost, gradient, self.predicted) >= 1e-4 * self.predicted
        good = fresh | ((cost < HUGE / 1e6) & lower)
        found = replace(
            self,
            x=self.trial,
            cost=cost,
            gradient=gradient,
            noise=noise,
            longest=jnp.maximum(self.longest, norm(self.trial)),
            values=values,
            vectors=vectors,
            floor=floor,
            damping=jnp.where(self.damping > 1e-6 * values[-1], self.damping / 4, 0),
            rejected=jnp.zeros_like(self.rejected),
        )
        most = jnp.max(jnp.abs(self.values))
        more = jnp.maximum(4 * self.damping, jnp.maximum(1e-3 * most, 2 * -self.values[0]))
        after = choose(good, found, replace(self, damping=more, rejected=self.rejected + 1))
        return replace(after, count=jnp.maximum(self.count, 0) + 1)._conclude(tolerance, limit)

    def _conclude(self, tolerance: Any, limit: int) -> "Packed":
        """Set the next trial, the error of the current point, and a reason to end if there is one."""
        smallest, most = self.values[0], jnp.max(jnp.abs(self.values))
        error, still = self.away(smallest), self.rise <= self.noise
        solved = (smallest > self.floor) & (error <= tolerance)
        hopeless = still & (smallest > self.floor)  # the gradient is as small as rounding allows
        flat = (self.rise <= tolerance * most * self.scale) & (jnp.abs(smallest) <= self.floor)
        reason = self.verdict(self.predicted, limit)
        reason = jnp.where(hopeless, Reason.INACCURATE, reason)
        reason = jnp.where((flat | still) & (jnp.abs(smallest) <= self.floor), Reason.ILL_POSED, reason)
        reason = jnp.where(solved, Reason.TOLERANCE, reason).astype(jnp.int32)
        curved = jnp.maximum(jnp.abs(self.values), jnp.maximum(self.damping, self.floor))
        along = self.vectors.T @ self.gradient
        weights = -along / jnp.where(curved > 0, curved, 1)
        # At a saddle point the gradient is zero; the direction of the most negative curvature leads away.
        leap = -jnp.where(along[0] >= 0, 1, -1) * 0.1 * jnp.maximum(norm(self.x), 1) / (1 + self.rejected)
        saddle = (smallest < -self.floor) & (jnp.abs(weights[0]) < jnp.abs(leap)) & (self.damping == 0)
        weights = weights.at[0].set(jnp.where(saddle, leap, weights[0]))
        predicted = -(along @ weights + 0.5 * jnp.sum(self.values * weights**2))
        return replace(
            self,
            trial=self.x + self.vectors @ weights,
            predicted=jnp.maximum(predicted, 0),
            reason=jnp.where(self.reason == RUNNING, reason, self.reason).astype(jnp.int32),
            error=jnp.where(smallest > self.floor, error, -1),
        )


def pack(hessian: Float[Array, "d d"]) -> Float[Array, " p"]:
    """Return the upper triangle of a symmetric matrix."""
    return hessian[jnp.triu_indices(hessian.shape[0])]


def unpack(upper: Float[Array, " p"], size: int) -> Float[Array, "d d"]:
    """Return the symmetric matrix with this upper triangle."""
    half = jnp.zeros((size, size), upper.dtype).at[jnp.triu_indices(size)].set(upper)
    return half + jnp.triu(half, 1).T
