"""Newton's method by products with the mean Hessian: conjugate gradients inside a trust region, and a random probe.

The inexact Newton steps follow Eisenstat and Walker (1996), and the trust region Steihaug (1983). One vector is
averaged at a time: the gradient at a trial point, or a product with a direction.
"""

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from hyperpush.base.status import Reason
from hyperpush.solving.common import ROUNDING, choose
from hyperpush.solving.descent import Descent
from hyperpush.solving.iterate import HUGE, RUNNING, Point
from hyperpush.solving.settings import norm

# Phases, by the averaged vector: the gradient at the trial, a product for the Newton system, a product for the probe.
TRIAL, SYSTEM, PROBE = range(3)
LOOSE = 0.5  # share of the gradient that a first Newton step may leave as residual
HIDDEN = 0.1  # with a residual below this share of the probe's part along a direction, no eigenvector is still hidden
CAUTION = 1.3  # factor by which the smallest eigenvalue may have fallen since it was found


class Steps(Point):
    """The best point so far, and the progress of the next Newton step from this point."""

    probe: Float[Array, " d"]  # random, the same at every client
    phase: Int[Array, ""]
    descent: Descent  # conjugate gradients on the Newton system or on the probe
    unit: Float[Array, ""]  # norm of the gradient at x; step and image are in units of it
    step: Float[Array, " d"]
    image: Float[Array, " d"]  # H times the step
    bounded: Bool[Array, ""]  # True if the step ends at the edge of the trust region
    region: Float[Array, ""]  # radius of the trust region
    forcing: Float[Array, ""]  # share of the gradient that the next Newton step may leave as residual
    smallest: Float[Array, ""]  # smallest eigenvalue of the mean Hessian, from the last steps; 0: not known
    probed: Float[Array, ""]  # smallest eigenvalue of the mean Hessian, from a probe; 0: not known
    largest: Float[Array, ""]  # largest curvature of the clients' Hessians so far, as root mean square over clients

    @property
    def direction(self) -> Float[Array, " d"]:
        return self.descent.direction

    @property
    def known(self) -> Float[Array, ""]:
        """The smallest eigenvalue found; 0: not known."""
        both = jnp.minimum(self.smallest, self.probed)
        return jnp.where((self.smallest > 0) & (self.probed > 0), both, jnp.maximum(self.smallest, self.probed))

    @property
    def floor(self) -> Float[Array, ""]:
        """Limit below which curvatures count as zero."""
        return ROUNDING * jnp.finfo(self.x.dtype).eps * self.largest

    def look(self, means: tuple[Any, ...], tolerance: Any, limit: int) -> "Steps":
        """Return the state after the means of its phase have arrived."""
        cost, vector, squares = means
        size = norm(self.direction)
        spread = jnp.sqrt(squares) / jnp.where(size > 0, size, 1)
        largest = jnp.where(self.phase == TRIAL, self.largest, jnp.maximum(self.largest, spread))
        state = replace(self, largest=largest)
        moved = state._compare(cost, vector, jnp.sqrt(squares), tolerance, limit)
        along = choose(state.phase == SYSTEM, state._descend(vector, tolerance), state._probe(vector, tolerance))
        return choose(state.phase == TRIAL, moved, along)

    # --------------------------------------------------------------- the trial

    def _compare(
        self, cost: Array, gradient: Float[Array, " d"], rms: Float[Array, ""], tolerance: Any, limit: int
    ) -> "Steps":
        """Keep the better one of the trial and the previous point, and prepare the next phase."""
        fresh, step = self.count <= 0, self.unit * self.step
        predicted = -self.unit * (self.gradient @ self.step + 0.5 * self.unit * self.step @ self.image)
        gained = self.gain(cost, gradient, predicted)
        ratio = jnp.where(cost < HUGE / 1e6, gained / jnp.maximum(predicted, jnp.finfo(cost.dtype).tiny), -1)
        ratio = jnp.where(fresh, 1, ratio)
        good = fresh | (ratio > 1e-4)
        length, noise = norm(step), 2 * jnp.finfo(gradient.dtype).eps * rms
        wider = jnp.where((ratio > 0.75) & self.bounded, 2 * self.region, self.region)
        region = jnp.where(ratio < 0.25, length / 4, wider)
        before, size = self.rise, norm(gradient)
        rate = jnp.minimum(size / jnp.where(before > 0, before, 1), 1)
        least = 0.9 * self.forcing**2
        forcing = jnp.minimum(LOOSE, jnp.maximum(0.9 * rate**2, jnp.where(least > 0.1, least, 0)))
        found = replace(
            self,
            x=self.trial,
            cost=cost,
            gradient=gradient,
            noise=noise,
            longest=jnp.maximum(self.longest, norm(self.trial)),
            forcing=jnp.where(fresh, LOOSE, forcing),
            rejected=jnp.zeros_like(self.rejected),
        )
        worse = replace(self, forcing=jnp.full_like(self.forcing, LOOSE), rejected=self.rejected + 1)
        after = replace(
            choose(good, found, worse), region=jnp.minimum(region, HUGE), count=jnp.maximum(self.count, 0) + 1
        )
        reason = jnp.where(self.reason == RUNNING, after.verdict(predicted, limit), self.reason)
        after = replace(after, reason=jnp.where(fresh, self.reason, reason).astype(jnp.int32))
        return after._judge(tolerance)

    def _judge(self, tolerance: Any) -> "Steps":
        """Start a probe if the point seems solved; otherwise end, or start another Newton step."""
        still = self.rise <= self.noise
        error = self.away(self.known)
        close = still | ((self.known > 0) & (error <= tolerance))
        known = replace(self, error=jnp.where(self.known > 0, error, -1))
        # If a probe in this solve or the previous one found the smallest eigenvalue, no new probe is needed.
        return choose(close & (self.probed <= 0), known._start_probe(), known._end_or_step(close, tolerance))

    def _end_or_step(self, close: Bool[Array, ""], tolerance: Any) -> "Steps":
        error = self.away(self.known)
        solved, hopeless = close & (error <= tolerance), self.rise <= self.noise
        reason = jnp.where(hopeless, Reason.INACCURATE, self.reason)
        reason = jnp.where(solved, Reason.TOLERANCE, reason)
        ended = solved | hopeless
        after = replace(self, error=jnp.where(self.known > 0, error, -1))
        reason = jnp.where(ended & (self.reason == RUNNING), reason, self.reason).astype(jnp.int32)
        return replace(choose(ended, after, after._start_step()), reason=reason)

    def _start_step(self) -> "Steps":
        unit = self.rise
        residual = -self.gradient / jnp.where(unit > 0, unit, 1)
        none = jnp.zeros_like(residual)
        descent = Descent.start(residual, self.descent.ritz.pivots.size)
        phase = jnp.asarray(SYSTEM, jnp.int32)
        return replace(
            self, phase=phase, descent=descent, unit=unit, step=none, image=none, bounded=jnp.zeros((), bool)
        )

    # ------------------------------------------------------------- Newton step

    def _descend(self, image: Float[Array, " d"], tolerance: Any) -> "Steps":
        """Take a step of conjugate gradients, to the trust region's edge if it leads out or curvature is negative."""
        direction, curvature = self.direction, self.descent.curvature(image)
        nonconvex = curvature <= self.floor
        first = jnp.maximum(norm(self.x), 1) / jnp.where(self.unit > 0, self.unit, 1)
        edge = self.region / jnp.where(self.unit > 0, self.unit, 1)
        edge = jnp.where(nonconvex & (self.region >= HUGE), jnp.maximum(norm(self.step), first), edge)
        descent, length = self.descent.advance(image)
        leaves = nonconvex | (norm(self.step + length * direction) >= edge)
        length = jnp.where(leaves, to_edge(self.step, direction, edge), length)
        step, product = self.step + length * direction, self.image + length * image
        seen = jnp.where(leaves, self.smallest, descent.ritz.smallest(self.floor))
        least = 10 * jnp.finfo(image.dtype).eps
        enough = 0.3 * tolerance * self.scale * self.known / jnp.where(self.unit > 0, self.unit, 1)
        target = jnp.maximum(jnp.maximum(jnp.minimum(self.forcing, LOOSE), enough), least)
        done = leaves | (descent.size <= target) | (descent.ritz.count >= descent.ritz.pivots.size)
        return replace(
            self,
            descent=choose(leaves, self.descent, descent),
            step=step,
            image=product,
            smallest=seen,
            bounded=leaves,
            region=jnp.where(nonconvex, jnp.minimum(self.region, edge * self.unit), self.region),
            trial=self.x + self.unit * step,
            phase=jnp.where(done, TRIAL, SYSTEM).astype(jnp.int32),
        )

    # ---------------------------------------------------------------- the probe

    def _start_probe(self) -> "Steps":
        descent = Descent.start(self.probe, self.descent.ritz.pivots.size)
        return replace(self, phase=jnp.asarray(PROBE, jnp.int32), descent=descent)

    def _probe(self, image: Float[Array, " d"], tolerance: Any) -> "Steps":
        """Take a step of conjugate gradients on the probe; end once no eigenvector can still be hidden."""
        curvature, room = self.descent.curvature(image), self.descent.ritz.pivots.size
        flat, nonconvex = jnp.abs(curvature) <= self.floor, curvature < -self.floor
        descent, _ = self.descent.advance(image)
        hidden = HIDDEN / jnp.sqrt(self.x.size) * norm(self.probe)
        settled = (descent.size <= hidden) | (descent.ritz.count >= room)
        seen = descent.ritz.smallest(self.floor)
        further = replace(self, descent=descent)
        singular = seen <= self.floor
        done = replace(further, probed=seen)._end_or_step(jnp.ones((), bool), tolerance)
        ill_posed = replace(self, reason=jnp.asarray(Reason.ILL_POSED, jnp.int32), error=-jnp.ones_like(self.error))
        after = choose(settled, choose(singular, ill_posed, done), further)
        return choose(nonconvex, self._escape(image), choose(flat, ill_posed, after))

    def _escape(self, image: Float[Array, " d"]) -> "Steps":
        """Try a direction of negative curvature, found by the probe at a point where the gradient is zero."""
        direction, size = self.direction, norm(self.direction)
        uphill = jnp.where(self.gradient @ direction > 0, -1, 1)
        length = jnp.minimum(self.region, 0.1 * jnp.maximum(norm(self.x), 1)) * uphill / jnp.where(size > 0, size, 1)
        one = jnp.ones_like(self.unit)
        return replace(
            self,
            unit=one,
            step=length * direction,
            image=length * image,
            bounded=jnp.ones((), bool),
            region=jnp.abs(length) * size,
            trial=self.x + length * direction,
            phase=jnp.asarray(TRIAL, jnp.int32),
        )


def to_edge(step: Float[Array, " d"], direction: Float[Array, " d"], edge: Float[Array, ""]) -> Float[Array, ""]:
    """Return the multiple of `direction` that leads from a step inside the trust region to the region's edge."""
    squared, along, rest = direction @ direction, step @ direction, jnp.maximum(edge**2 - step @ step, 0)
    root = jnp.sqrt(along**2 + squared * rest)
    return (root - along) / jnp.where(squared > 0, squared, 1)
