"""Errors a user can act on: each names the field, what was given and what is allowed."""

import difflib
from collections.abc import Iterable


class HyperpushError(Exception):
    """Base of every error that hyperpush raises on purpose; the command line ends with exit code 2 on it."""


class InvalidInput(HyperpushError, ValueError):
    """A configuration, argument or data value that cannot be used."""

    def __init__(self, field: str, given: object, allowed: str):
        self.field = field
        self.given = given
        self.allowed = allowed
        super().__init__(f"{field}: got {given!r}; allowed: {allowed}")


class Diverged(HyperpushError, ArithmeticError):
    """An iteration left the finite numbers."""

    def __init__(self, where: str, round: int, advice: str):
        self.where = where
        self.round = round
        super().__init__(f"{where}: left the finite numbers in round {round}; {advice}")


def unknown(field: str, given: str, known: Iterable[str]) -> InvalidInput:
    """The error for a name that does not exist, suggesting the nearest one."""
    names = sorted(known)
    near = difflib.get_close_matches(given, names, n=1, cutoff=0.4)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    return InvalidInput(field, given, ", ".join(names) + hint)
