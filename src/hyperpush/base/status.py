"""Describe whether a result converged, and why or why not."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass, replace
from enum import IntEnum
from typing import Any

# Limits of the rule by which params count as solving the inner problem (guides/status.md). The distance of the params
# is the length of a Newton step plus the disagreement of the clients, both relative to the size of the params.
UNSOLVED = 0.1  # a Newton step longer than this share of the params' size tells nothing about the solution
CHANGED = 0.03  # largest relative change of a hypergradient that is estimated again after the Newton step
EXACT = 1e-6  # below this distance, an estimate is not repeated after a Newton step
NEAR = 2e-4  # the same limit at later outer steps; training below this distance counts as solved
AROUND = 0.02  # up to this distance, training may be good enough, which only a hypergradient can tell
STATIONARY = 1e-2  # at a stationary point, the hypergradient is at most this share of that at the start


class Reason(IntEnum):
    """Reason why a method ended, ordered from best to worst. For several results, the largest reason counts."""

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
    "growing": "numbers are a million times larger than the start and the data",
    "limit": "step limit reached",
    "stalled": "steps bring no progress",
    "inaccurate": "rounding, or the condition of the problem, allows no better",
    "ill-posed": "the Hessian is singular or indefinite",
    "unsolved": "the params do not solve the inner problem",
    "refused": "messages of a member cannot be true",
    "isolated": "averages of this party say little about the others",
}


@dataclass(frozen=True)
class Status:
    """Reliability of a result: whether it converged, the reason, and the measured errors.

    Attributes:
        converged: True or False; None if it was not measured, as for methods with a fixed number of steps.
        reason: Why the method ended, or why the result is not trusted. `"tolerance"`: the tolerance was met.
            `"fixed-length"`: all of a fixed number of steps were taken. `"early-stopping"`: the metric stopped the run.
            `"limit"`: the step limit was reached. `"stalled"`: steps bring no progress. `"inaccurate"`: rounding allows
            no better. `"ill-posed"`: the Hessian is singular or indefinite. `"unsolved"`: the params do not solve the
            inner problem. `"growing"`: numbers grow without bound. `"refused"` and `"isolated"`: see these fields.
        residual: The length of a Newton step from the clients' mean params, relative to the size of these params. For
            several results, the largest. None if it is not known.
        disagreement: The root mean square of the distances of the clients' params from their mean, relative to the size
            of the mean params. None if it is not known.
        moved: Relative change of the hypergradient by the Newton step. None if the params are so close to the solution
            that it was not measured, or if it is not known.
        error: An estimate of the result's relative error, usually too large. None if it is not known, such as at params
            that do not solve the inner problem.
        runs: Number of inner solves and estimates that this status covers.
        failed: Largest number of failed runs at any client. 0 if several runs succeeded and only the final residual is
            too large.
        chosen: The solver that `hp.AutomaticInner` chose, the estimator that `hp.Automatic` chose, and the reasons;
            empty if there was nothing to choose.
        singular: How the method treats a singular Hessian: `"refuse"`, `"minimum-norm"` or `"damping"`. None if the
            method lacks this option.
        gradient: Size of the hypergradient at the end of `hp.solve` divided by its size at the start, both at inner
            solutions. For common hypers, this is the size of the mean hypergradient; for personal hypers, the root mean
            square over clients. None if it is not known.
        stationary: True if `gradient` is at most 0.01, False if it is larger, None if it is not known.
        stationary_reason: Reason why `stationary` is None; or, if it is False, the other fixed point from the papers
            (x_L or x_M, see `hyperpush.algorithms.base`) at which the algorithm ended. Empty if neither applies.
        hint: Likely cause, in the data, of a result that did not converge; empty if none was found.
        refused: Names of peers that sent messages with impossible content, with counts and reasons; empty if there are
            none. If not empty, `converged` is never True.
        isolated: Description of averages in which this party received too little from the others; empty if there are
            none. If not empty, `converged` is never True.

    Example:
        >>> import hyperpush as hp
        >>> print(hp.Status(converged=False, reason="limit", error=0.3))
        ! not converged (limit: step limit reached, relative error up to 0.3)
    """

    converged: bool | None = None
    reason: str = "fixed-length"
    residual: float | None = None
    disagreement: float | None = None
    moved: float | None = None
    error: float | None = None
    runs: int = 1
    failed: int = 0
    chosen: str = ""
    singular: str | None = None
    refused: str = ""
    isolated: str = ""
    gradient: float | None = None
    stationary: bool | None = None
    stationary_reason: str = ""
    hint: str = ""

    def __str__(self) -> str:
        return "; ".join(part for part in (self._convergence(), self._stationarity()) if part)

    @property
    def warnings(self) -> list[str]:
        """Sentences for a result that did not converge or is not stationary; empty for other results."""
        said = [] if self.converged is not False else [f"The result is {self._convergence().removeprefix('! ')}."]
        return [*said, f"It is {self._stationarity()}."] if self.stationary is False else said

    def _stationarity(self) -> str:
        """Return a text that says whether the end is a stationary point; empty if it is not known."""
        if self.stationary is None:
            return ""
        ended = f", {self.stationary_reason}" if self.stationary_reason else ""
        said = "stationary" if self.stationary else "not stationary"
        return f"{said} (gradient {self.gradient:.2g} of the start's{ended})"

    def _convergence(self) -> str:
        if self.converged is not False:
            if self.converged and self.reason == "early-stopping":
                return "stopped by its metric, estimates converged"
            how = self.reason if self.singular in (None, "refuse") else f"{self.reason}, {self.singular}"
            return f"converged ({how})" if self.converged else self.reason.replace("-", " ")
        facts = [f"{self.reason}: {EXPLAINED[self.reason]}" if self.reason in EXPLAINED else self.reason]
        if self.error is not None:
            facts.append(f"relative error up to {self.error:.2g}")
        facts += [each for each in (self.refused, self.isolated) if each]
        facts += self._distances() if self.reason == "unsolved" else []
        if self.runs > 1:
            facts.append(f"{self.failed} of {self.runs} solves" if self.failed else f"at the end of {self.runs} solves")
        facts += [self.hint] if self.hint else []
        return f"! not converged ({', '.join(facts)})"

    def refusing(self, refused: Mapping[str, Mapping[str, int]]) -> "Status":
        """Return this status with refused messages; `refused` counts them by member and reason."""
        if not refused:
            return self
        counts = {
            name: ", ".join(f"{count} {reason}" for reason, count in each.items()) for name, each in refused.items()
        }
        told = "; ".join(f"refused of {name}: {said}" for name, said in counts.items())
        reason = self.reason if self.converged is False else "refused"
        return replace(self, converged=False, reason=reason, refused=told)

    def with_doubts_of(self, run: "Status") -> "Status":
        """Return this status with the refused messages and isolated averages of the run that led to its result."""
        if not (run.refused or run.isolated):
            return self
        reason = self.reason if self.converged is False else run.reason
        return replace(self, converged=False, reason=reason, refused=run.refused, isolated=run.isolated)

    def with_isolation(self, words: str) -> "Status":
        """Return this status with a description (`words`) of averages that contain too little from other parties."""
        if not words:
            return self
        reason = self.reason if self.converged is False else "isolated"
        return replace(self, converged=False, reason=reason, isolated=words)

    def _distances(self) -> list[str]:
        """Return texts that describe the distance of the params from the inner solution."""
        if self.residual == math.inf:
            return ["the mean params are zero and should not be"]
        facts = []
        if self.residual is not None:
            facts.append(f"a Newton step moves params by {self.residual:.2g}")
        if self.disagreement is not None:
            facts.append(f"clients disagree by {self.disagreement:.2g}")
        if self.moved is not None:
            facts.append(f"the hypergradient changes by {self.moved:.2g}")
        return facts

    def as_json(self) -> dict[str, Any]:
        """Return the fields by name; infinity, which JSON cannot hold, becomes None."""
        return {name: None if value == math.inf else value for name, value in asdict(self).items()}

    @staticmethod
    def of_all(statuses: "Sequence[Status]") -> "Status":
        """Return one status for several results.

        It is the status of the first result that did not converge, else of the first with an unknown status. Its errors
        are the largest of all results, and its numbers of runs and failures are totals.
        """
        if len(statuses) == 1:
            return statuses[0]
        order = (False, None, True)
        worst = min(statuses, key=lambda each: order.index(each.converged))
        errors = [each.error for each in statuses]
        return replace(
            worst,
            error=None if None in errors else _largest(statuses, "error"),
            **{name: _largest(statuses, name) for name in ("residual", "disagreement", "moved", "gradient")},
            stationary=min((each.stationary for each in statuses), key=order.index),
            runs=sum(each.runs for each in statuses),
            failed=sum(max(each.failed, each.converged is False) for each in statuses),
        )

    def judged(self, by: "Status") -> "Status":
        """Return the status of a result at params that have the status `by`: the worse of this status and `by`."""
        known = {name: _largest([self, by], name) for name in ("residual", "disagreement", "moved")}
        if self.converged is False or by.converged:
            return replace(self, **known)
        if by.converged is None:
            return replace(self, converged=None, reason=by.reason, **known)
        # `error` is dropped, because it measures the solution of the linear system at these params. It does not measure
        # the distance from the derivative at an inner solution. With several estimates, `by` judges the params after
        # the last one.
        failed = self.failed if self.runs > 1 else 1
        return replace(self, converged=False, reason=by.reason, error=None, failed=failed, **known)


def _largest(statuses: "Sequence[Status]", name: str) -> float | None:
    """Return the largest known value of a field; None if no status knows it."""
    known: list[float] = [getattr(each, name) for each in statuses if getattr(each, name) is not None]
    return max(known, default=None)


_seen: ContextVar[list[Status] | None] = ContextVar("seen", default=None)


def is_growing(result: Mapping[str, Any]) -> bool:
    """Return True if the status of a result, given as in `result.json`, says that numbers grow without bound."""
    status = result.get("status")
    return isinstance(status, Mapping) and status.get("reason") == "growing"


@contextmanager
def gather_statuses() -> Iterator[list[Status]]:
    """Collect the statuses of all results that verbs return in the block."""
    seen: list[Status] = []
    before = _seen.set(seen)
    try:
        yield seen
    finally:
        _seen.reset(before)


def note_status(status: Status) -> None:
    """Add a status to the list of the enclosing `gather_statuses` block, if there is one."""
    if (seen := _seen.get()) is not None:
        seen.append(status)
