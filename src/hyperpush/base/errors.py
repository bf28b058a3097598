"""Define the errors that users see. Errors about input name the field, the given value and the allowed values."""

import difflib
import textwrap
from collections.abc import Iterable
from typing import Any, ClassVar

from hyperpush.base.status import Status


class HyperpushError(Exception):
    """Base class of all errors that hyperpush raises on purpose; the command line ends with the error's `exit_code`.

    Example:
        >>> import hyperpush as hp
        >>> issubclass(hp.InvalidInput, hp.HyperpushError)
        True
    """

    exit_code: ClassVar[int] = 2  # bad input, or a file that cannot be read or written


class Absent(HyperpushError):
    """A required party is missing, or this party has started too late."""

    exit_code = 4


class Refused(HyperpushError):
    """A member of the run sent a message with impossible content, so the run cannot continue."""

    exit_code = 5


class InUse(HyperpushError):
    """Another process is using the folder."""

    exit_code = 6


class Stopped(HyperpushError):
    """A signal has ended the process after a checkpoint was written.

    Args:
        message: Sentence that names the stopped command and says how to continue it.
        signal: The number of the signal. The exit code is 128 plus this number.
    """

    def __init__(self, message: str, signal: int):
        self.signal = signal
        super().__init__(message)

    @property
    def exit_code(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return 128 + self.signal


class InvalidInput(HyperpushError, ValueError):
    """A configuration, argument or data value that cannot be used.

    Args:
        field: Dotted name of the invalid field, such as `SGP.step_size`.
        given: The given value.
        allowed: The allowed values, in words.

    Example:
        >>> import hyperpush as hp
        >>> try:
        ...     hp.SGP(steps=10, step_size=-1)
        ... except hp.InvalidInput as error:
        ...     print(error)
        SGP.step_size: got -1.0; allowed: a finite number above 0
    """

    def __init__(self, field: str, given: object, allowed: str):
        self.field = field
        self.given = given
        self.allowed = allowed
        shown = repr(given)
        if "\n" in shown:  # the text of an array has several lines
            shown = textwrap.shorten(shown, 100, placeholder=" …")
        super().__init__(f"{field}: got {shown}; allowed: {allowed}")


class Diverged(HyperpushError, ArithmeticError):
    """An iteration diverged: a number became NaN or infinite. The error's `status` has the reason `"diverged"`.

    Args:
        where: Name of the method.
        round: Communication round in which the number was found.
        advice: A sentence on what to try.

    Attributes:
        history: Rows recorded before the divergence, like `Solution.history`; None if the run recorded none.

    Example:
        >>> import hyperpush as hp
        >>> task = hp.tasks.quadratic(3, seed=0)
        >>> try:
        ...     hp.train(task, hp.SGP(steps=1000, step_size=100.0), hp.networks.Ring(3), key=0)
        ... except hp.Diverged as error:
        ...     print(error.where)
        SGP
    """

    exit_code = 3

    def __init__(self, where: str, round: int, advice: str):
        self.where = where
        self.round = round
        self.advice = advice
        self.status = Status(converged=False, reason="diverged", failed=1)
        self.rows: Any = None  # rows that the engine recorded before the divergence
        self.history: Any = None
        super().__init__(f"{where} diverged (NaN or infinity) in round {round}. {advice}")

    def named(self, method: str, advice: str | None = None) -> "Diverged":
        """Return the same error with the name of a method if it names only a loop, and with other advice if given.

        Names of loops, unlike names of methods, begin with a small letter.
        """
        where = self.where if self.where[:1].isupper() else method
        named = Diverged(where, self.round, self.advice if advice is None else advice)
        named.rows, named.history = self.rows, self.history
        return named


class NotConverged(HyperpushError):
    """A result did not converge; verbs raise this error with `throw=True`.

    Args:
        result: The result, which the error keeps as `error.result`.

    Example:
        >>> import hyperpush as hp
        >>> task, network = hp.tasks.quadratic(3, seed=0), hp.networks.Ring(3)
        >>> try:
        ...     hp.train(task, hp.SGP(steps=1, step_size=0.1), network, key=0, throw=True)
        ... except hp.NotConverged as error:
        ...     print(error.result.status.reason)
        unsolved
    """

    def __init__(self, result: Any):
        self.result = result
        super().__init__(f"{type(result).__name__}: {result.status}")


def unknown(field: str, given: object, known: Iterable[str]) -> InvalidInput:
    """Return the error for a name that does not exist; it lists the known names and suggests the nearest one."""
    names = sorted(known)
    near = difflib.get_close_matches(given, names, n=1, cutoff=0.4) if isinstance(given, str) else []
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    return InvalidInput(field, given, ", ".join(names) + hint)
