"""Whether to believe a result, and why."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from enum import IntEnum

# Residual of the inner problem above which an estimate is not believed. SGP's own bias leaves 0.002 to 0.05 on the
# tasks of the documentation, and a network before training has about 1.
UNSOLVED = 0.1


class Reason(IntEnum):
    """Why a method ended, from the best to the worst: of several, the largest is the status of all."""

    TOLERANCE = 0
    FIXED_LENGTH = 1
    UNSOLVED = 2
    LIMIT = 3
    STALLED = 4
    INACCURATE = 5
    ILL_POSED = 6

    @property
    def text(self) -> str:
        return self.name.lower().replace("_", "-")

    @property
    def converged(self) -> bool | None:
        return {Reason.TOLERANCE: True, Reason.FIXED_LENGTH: None}.get(self, False)


EXPLAINED = {
    "diverged": "a number became NaN or infinite",
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
        residual: How far the inner problem is from solved: the norm of the mean inner gradient, in units of its scale,
            or the length of a Newton step, in units of the params, if that is larger and was looked for; the largest of
            several. None if it was not measured.
        error: An estimate of the result's relative error, usually too large; None where there is none, as at params
            that do not solve the inner problem.
        runs: How many inner solves and estimates it speaks of.
        failed: How many of them did not converge, at the client where most did not; 0 of several where only the
            residual at the end is too large.
        chosen: Which estimator `hp.Automatic` took, and why; empty where there was nothing to choose.
        singular: What a singular Hessian is answered with: `"refuse"`, `"minimum-norm"` or `"damping"`; None where
            there is no such choice.

    Example:
        >>> import hyperpush as hp
        >>> print(hp.Status(converged=False, reason="limit", error=0.3))
        ! not converged (limit: it took all steps that it was given, relative error up to 0.3)
    """

    converged: bool | None = None
    reason: str = "fixed-length"
    residual: float | None = None
    error: float | None = None
    runs: int = 1
    failed: int = 0
    chosen: str = ""
    singular: str | None = None

    def __str__(self) -> str:
        if self.converged is not False:
            if self.converged and self.reason == "early-stopping":
                return "stopped by its metric, estimates converged"
            how = self.reason if self.singular in (None, "refuse") else f"{self.reason}, {self.singular}"
            return f"converged ({how})" if self.converged else self.reason.replace("-", " ")
        facts = [f"{self.reason}: {EXPLAINED[self.reason]}" if self.reason in EXPLAINED else self.reason]
        if self.error is not None:
            facts.append(f"relative error up to {self.error:.2g}")
        if self.reason == "unsolved" and self.residual is not None:
            facts.append(f"inner residual {self.residual:.2g}, above {UNSOLVED}")
        if self.runs > 1:
            facts.append(f"{self.failed} of {self.runs} solves" if self.failed else f"at the end of {self.runs} solves")
        return f"! not converged ({', '.join(facts)})"

    @staticmethod
    def of_all(statuses: "Sequence[Status]") -> "Status":
        """The status of several results: that of the first that did not converge, with the numbers of all."""
        if len(statuses) == 1:
            return statuses[0]
        order = (False, None, True)
        worst = min(statuses, key=lambda each: order.index(each.converged))
        errors, residuals = ([getattr(each, name) for each in statuses] for name in ("error", "residual"))
        return replace(
            worst,
            error=None if None in errors else max(errors),
            residual=max((each for each in residuals if each is not None), default=None),
            runs=sum(each.runs for each in statuses),
            failed=sum(max(each.failed, each.converged is False) for each in statuses),
        )

    def at(self, residual: float) -> "Status":
        """The status of an estimate at params with this inner residual; those that solve nothing are not believed."""
        largest = max(residual, self.residual or 0.0)
        if self.converged is False or residual <= UNSOLVED:
            return replace(self, residual=largest)
        # The error is that of the linear system, not of a derivative of the solution. And of several estimates these
        # are the params after the last.
        failed = self.failed if self.runs > 1 else 1
        return replace(self, converged=False, reason="unsolved", residual=largest, error=None, failed=failed)


_seen: ContextVar[list[Status] | None] = ContextVar("seen", default=None)


@contextmanager
def gather_statuses() -> Iterator[list[Status]]:
    """The statuses of all results that verbs return inside."""
    seen: list[Status] = []
    before = _seen.set(seen)
    try:
        yield seen
    finally:
        _seen.reset(before)


def note_status(status: Status) -> None:
    """Hand a status to whoever gathers them around this call."""
    if (seen := _seen.get()) is not None:
        seen.append(status)
