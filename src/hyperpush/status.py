"""Whether to believe a result, and why."""

from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

UNSOLVED = 0.1  # mean inner gradient, in units of its scale, above which an estimate is not believed
LARGEST = 1e30  # what an estimate of an error is cut off at: states must be finite


class Reason(IntEnum):
    """Why a method ended, from the best to the worst: of several, the largest is the status of all."""

    TOLERANCE = 0
    FIXED_LENGTH = 1
    LIMIT = 2
    STALLED = 3
    INACCURATE = 4
    ILL_POSED = 5

    @property
    def text(self) -> str:
        return self.name.lower().replace("_", "-")

    @property
    def converged(self) -> bool | None:
        return {Reason.TOLERANCE: True, Reason.FIXED_LENGTH: None}.get(self, False)


EXPLAINED = {
    "limit": "it took all steps that it was given",
    "stalled": "steps bring no progress",
    "inaccurate": "rounding, or the condition of the problem, allows no better",
    "ill-posed": "the Hessian is singular or indefinite",
    "unsolved": "the params do not solve the inner problem",
}


@dataclass(frozen=True)
class Status:
    """Whether to believe a result.

    Attributes:
        converged: True or False; None for methods of fixed length, which do not measure it.
        reason: Why it ended: `"tolerance"`, `"limit"` (of steps), `"inaccurate"` (rounding allows no better),
            `"stalled"`, `"ill-posed"` (a singular or indefinite Hessian), `"unsolved"` (the params do not solve the
            inner problem), `"early-stopping"` or `"fixed-length"`.
        residual: How far the inner problem is from solved: the norm of the mean inner gradient, in units of its scale.
            None if it was not measured.
        error: An estimate of the result's relative error, usually too large; None where there is none.
        runs: How many inner solves and estimates it speaks of.
        failed: How many of them did not converge.
    """

    converged: bool | None = None
    reason: str = "fixed-length"
    residual: float | None = None
    error: float | None = None
    runs: int = 1
    failed: int = 0

    def __str__(self) -> str:
        said = self.reason.replace("-", " ")
        if self.converged is not False:
            return f"converged ({said})" if self.converged else said
        facts = [f"{said}: {EXPLAINED[self.reason]}" if self.reason in EXPLAINED else said]
        if self.error is not None:
            facts.append(f"relative error up to {self.error:.2g}")
        if self.reason == "unsolved" and self.residual is not None:
            facts.append(f"their mean gradient is {self.residual:.2g} of its scale")
        if self.runs > 1:
            facts.append(f"{self.failed} of {self.runs} solves")
        return f"! not converged ({', '.join(facts)})"

    def at(self, residual: float) -> "Status":
        """The status of an estimate at params with this inner residual; those that solve nothing are not believed."""
        if self.converged is False or residual <= UNSOLVED:
            return replace(self, residual=residual)
        return replace(self, converged=False, reason="unsolved", residual=residual, failed=self.runs)


class Report(eqx.Module):
    """What a client knows of the status while a program runs."""

    reason: Int[Array, "*clients"]  # a `Reason`
    error: Float[Array, "*clients"]  # below 0: not known
    runs: Int[Array, "*clients"]
    failed: Int[Array, "*clients"]

    @staticmethod
    def of(reason: Any, error: Any = -1.0) -> "Report":
        """The report of one solve or estimate."""
        reason = jnp.asarray(reason, jnp.int32)
        failed = (reason > Reason.FIXED_LENGTH).astype(jnp.int32)
        return Report(reason, jnp.minimum(jnp.asarray(error, jnp.zeros(()).dtype), LARGEST), jnp.ones_like(failed), failed)

    @staticmethod
    def none(shape: tuple[int, ...] = ()) -> "Report":
        """The report of nothing yet."""
        zeros = jnp.zeros(shape, jnp.int32)
        return Report(zeros, jnp.full(shape, -1.0), zeros, zeros)

    def worst(self, other: "Report") -> "Report":
        """The report of both."""
        return Report(
            jnp.maximum(self.reason, other.reason),
            jnp.maximum(self.error, other.error),
            self.runs + other.runs,
            self.failed + other.failed,
        )

    def status(self) -> Status:
        """The status that all clients' reports together give."""
        runs = int(np.max(self.runs))
        if runs == 0:
            return Status()
        reason, error = Reason(int(np.max(self.reason))), float(np.max(self.error))
        return Status(
            reason.converged, reason.text, error=error if error >= 0 else None, runs=runs, failed=int(np.max(self.failed))
        )
