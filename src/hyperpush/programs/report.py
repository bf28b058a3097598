"""What a client knows of the status of a result while a program runs."""

from dataclasses import replace
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from hyperpush.base.status import UNSOLVED, Reason, Status

LARGEST = 1e30  # what an estimate of an error is cut off at: states must be finite


class Report(eqx.Module):
    """What a client knows of the status while a program runs."""

    reason: Int[Array, "*clients"]  # a `Reason`
    error: Float[Array, "*clients"]  # below 0: not known
    runs: Int[Array, "*clients"]
    failed: Int[Array, "*clients"]
    residual: Float[Array, "*clients"]  # of the inner problem, the largest so far; below 0: not measured

    @staticmethod
    def of(reason: Any, error: Any = -1.0) -> "Report":
        """The report of one solve or estimate."""
        reason = jnp.asarray(reason, jnp.int32)
        failed = (reason > Reason.FIXED_LENGTH).astype(jnp.int32)
        error = jnp.minimum(jnp.asarray(error, jnp.zeros(()).dtype), LARGEST)
        return Report(reason, error, jnp.ones_like(failed), failed, jnp.full_like(error, -1))

    @staticmethod
    def none(shape: tuple[int, ...] = ()) -> "Report":
        """The report of nothing yet."""
        zeros = jnp.zeros(shape, jnp.int32)
        return Report(zeros, jnp.full(shape, -1.0), zeros, zeros, jnp.full(shape, -1.0))

    def at(self, residual: Float[Array, ""]) -> "Report":
        """The report of an estimate at params with this inner residual; those that solve nothing are not believed."""
        reason = jnp.where(self.runs == 0, Reason.FIXED_LENGTH, self.reason)
        reason = jnp.where((reason <= Reason.FIXED_LENGTH) & (residual > UNSOLVED), Reason.UNSOLVED, reason)
        error = jnp.where(reason == Reason.UNSOLVED, -1, self.error)  # of the linear system alone
        return replace(Report.of(reason, error), residual=jnp.minimum(residual.astype(self.error.dtype), LARGEST))

    def worst(self, other: "Report") -> "Report":
        """The report of both. An error that is not known is worse than any other."""
        known = ((self.error >= 0) | (self.runs == 0)) & ((other.error >= 0) | (other.runs == 0))
        return Report(
            jnp.maximum(self.reason, other.reason),
            jnp.where(known, jnp.maximum(self.error, other.error), -1),
            self.runs + other.runs,
            self.failed + other.failed,
            jnp.maximum(self.residual, other.residual),
        )

    def status(self) -> Status:
        """The status that all clients' reports together give."""
        runs = int(np.max(self.runs))
        if runs == 0:
            return Status()
        reason, error = Reason(int(np.max(self.reason))), float(np.max(self.error))
        residual = float(np.max(self.residual))
        return Status(
            reason.converged,
            reason.text,
            residual=residual if residual >= 0 else None,
            error=error if 0 <= error < LARGEST else None,
            runs=runs,
            failed=int(np.max(self.failed)),
        )
