"""Checks of options, each naming the field it refuses."""

import numpy as np

from hyperpush.errors import InvalidInput


def whole(field: str, given: object, least: int, most: int | None = None) -> int:
    """A whole number in a range."""
    if isinstance(given, int | np.integer) and not isinstance(given, bool):
        number = int(given)
        if number >= least and (most is None or number <= most):
            return number
    raise InvalidInput(field, given, f"a whole number from {least}" + (f" to {most}" if most is not None else ""))


def probability(field: str, given: object) -> float:
    """A number in [0, 1]."""
    if isinstance(given, int | float | np.number) and not isinstance(given, bool):
        number = float(given)
        if 0 <= number <= 1:  # false for nan
            return number
    raise InvalidInput(field, given, "a number from 0 to 1")


def probability_range(field: str, given: object) -> tuple[float, float]:
    """A pair low ≤ high of numbers in [0, 1]; one number stands for a pair of equal ones."""
    if not isinstance(given, tuple | list):
        only = probability(field, given)
        return only, only
    if len(given) == 2:
        low, high = (probability(field, end) for end in given)
        if low <= high:
            return low, high
    raise InvalidInput(field, given, "a number from 0 to 1, or a pair (low, high) of them with low ≤ high")


def positive(field: str, given: object) -> float:
    """A finite number above 0."""
    if isinstance(given, int | float | np.number) and not isinstance(given, bool):
        number = float(given)
        if 0 < number < float("inf"):
            return number
    raise InvalidInput(field, given, "a finite number above 0")


def not_negative(field: str, given: object) -> float:
    """A finite number from 0 on."""
    if isinstance(given, int | float | np.number) and not isinstance(given, bool):
        number = float(given)
        if 0 <= number < float("inf"):
            return number
    raise InvalidInput(field, given, "a finite number, 0 or more")


def yes_or_no(field: str, given: object) -> bool:
    """True or False."""
    if isinstance(given, bool):
        return given
    raise InvalidInput(field, given, "true or false")
