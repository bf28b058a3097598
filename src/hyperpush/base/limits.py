"""Define ranges of options for annotations: a text for `show`, and a check. This module does not import JAX."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

from hyperpush.base.checks import check_integer, check_number, check_positive
from hyperpush.base.errors import InvalidInput


@dataclass(frozen=True)
class Range:
    """Range of an option: its allowed values in words, and a check, which gets the option's name and the value."""

    words: str
    check: Callable[[str, Any], Any]

    def __call__(self, field: str, given: Any) -> None:
        self.check(field, given)

    def __repr__(self) -> str:  # so that `help` shows Annotated[int, 1 or more]
        return self.words


def whole(minimum: int, maximum: int | None = None) -> Range:
    """Return the range of whole numbers from `minimum` to `maximum`, both included."""
    words = f"{minimum} or more" if maximum is None else f"{minimum} to {maximum}"
    return Range(words, partial(check_integer, minimum=minimum, maximum=maximum))


def interval(low: float, high: float | None = None, *, outside: str = "") -> Range:
    """Return the range of finite numbers from `low` to `high`; `high=None` sets no upper bound.

    `outside` names the ends that are excluded: `"low"`, `"high"` or `"both"`; empty excludes none.
    """
    above, below = outside in ("low", "both"), outside in ("high", "both")
    start = f"above {low:g}" if above else f"{low:g} or more" if high is None else f"from {low:g}"
    end = "" if high is None else f" and below {high:g}" if above and below else f" to {'below ' * below}{high:g}"

    def holds(number: float) -> bool:
        return (number > low if above else number >= low) and (
            number < float("inf") if high is None else number < high if below else number <= high
        )

    words = start + end
    return Range(words, lambda field, given: check_number(field, given, holds, f"a finite number {words}"))


def _check_nonempty(field: str, given: Any) -> None:
    if len(given) == 0:
        raise InvalidInput(field, list(given), "a list of 1 or more")


Whole = Annotated[int, whole(0)]
Count = Annotated[int, whole(1)]
OptionalCount = Annotated[int | None, Range("1 or more, or None", partial(check_integer, minimum=1, optional=True))]
PositiveFloat = Annotated[float, Range("above 0", check_positive)]
NONEMPTY = Range("at least one", _check_nonempty)
