"""A client's part of the status of a result, kept in its state while a program runs."""

import math
from dataclasses import replace
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from hyperpush.base.arrays import filled
from hyperpush.base.status import AROUND, Reason, Status

LARGEST = 1e30  # upper limit of estimated errors, because states must be finite


class Report(eqx.Module):
    """A client's part of the status while a program runs. Numbers below 0 are unknown."""

    reason: Int[Array, "*clients"]  # a `Reason`
    error: Float[Array, "*clients"]  # relative error of the result
    runs: Int[Array, "*clients"]
    failed: Int[Array, "*clients"]
    residual: Float[Array, "*clients"]  # longest Newton step so far, relative to the params
    disagreement: Float[Array, "*clients"]  # of the clients' params, relative to the params
    moved: Float[Array, "*clients"]  # relative change of the result if the inner problem were solved

    @staticmethod
    def of(reason: Any, error: Any = -1.0) -> "Report":
        """Return the report of one solve or estimate that ended for this reason; an error below 0 is unknown."""
        reason = jnp.asarray(reason, jnp.int32)
        failed = (reason > Reason.FIXED_LENGTH).astype(jnp.int32)
        error = jnp.minimum(jnp.asarray(error, jnp.zeros(()).dtype), LARGEST)
        unknown = jnp.full_like(error, -1)
        return Report(reason, error, jnp.ones_like(failed), failed, unknown, unknown, unknown)

    @staticmethod
    def none(shape: tuple[int, ...] = ()) -> "Report":
        """Return an empty report."""
        zeros, unknown = filled(shape, 0, jnp.int32), filled(shape, -1)
        return Report(zeros, unknown, zeros, zeros, unknown, unknown, unknown)

    def judged(self, residual: Any, disagreement: Any, moved: Any) -> "Report":
        """Return the report with the quality of the params at which it was made."""
        kind = self.error.dtype
        known = (jnp.minimum(each, LARGEST).astype(kind) for each in (residual, disagreement, moved))
        error = jnp.where(
            self.reason == Reason.UNSOLVED, -1, self.error
        )  # the known error is that of the linear system alone
        return Report(self.reason, error, self.runs, self.failed, *known)

    def at_params(self, trained: "Report") -> "Report":
        """Return the report of estimates at params whose inner solve ended with `trained`.

        Params that are far from solved count as failed.
        """
        near = (trained.error >= 0) & (trained.error <= AROUND)
        unsolved = (trained.failed > 0) & ~near
        reason = jnp.where(unsolved, jnp.maximum(self.reason, Reason.UNSOLVED), self.reason)
        return replace(self, reason=reason, failed=self.failed + unsolved)

    def worst(self, other: "Report") -> "Report":
        """Return the worse of two reports. An unknown error is worse than any other."""
        known = ((self.error >= 0) | (self.runs == 0)) & ((other.error >= 0) | (other.runs == 0))
        return Report(
            jnp.maximum(self.reason, other.reason),
            jnp.where(known, jnp.maximum(self.error, other.error), -1),
            self.runs + other.runs,
            self.failed + other.failed,
            jnp.maximum(self.residual, other.residual),
            jnp.maximum(self.disagreement, other.disagreement),
            jnp.maximum(self.moved, other.moved),
        )

    def status(self) -> Status:
        """Return the status of all clients' reports together."""
        runs = int(np.max(np.asarray(self.runs)))
        if runs == 0:
            return Status()
        reason, error = Reason(int(np.max(np.asarray(self.reason)))), float(np.max(np.asarray(self.error)))
        return Status(
            reason.converged,
            reason.text,
            residual=_known(self.residual),
            disagreement=_known(self.disagreement),
            moved=_known(self.moved),
            error=error if 0 <= error < LARGEST else None,
            runs=runs,
            failed=int(np.max(np.asarray(self.failed))),
        )


def _known(numbers: Float[Array, "*clients"]) -> float | None:
    """Return the largest of the clients' numbers; None if it is unknown."""
    largest = float(np.max(np.asarray(numbers)))
    return None if largest < 0 else largest if largest < LARGEST else math.inf
