"""Types of options that say in which range a value lies: `Configured` checks it when an object is made.

A range is part of an annotation's metadata. Type checkers see the plain type.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import jax

from hyperpush.checks import check_integer, check_nonnegative, check_positive, check_probability
from hyperpush.errors import InvalidInput
from hyperpush.method import Number
from hyperpush.optimizers import StepSize, check_step_size, step_size_at


@dataclass(frozen=True)
class Range:
    """What a value has to be, in words and as a check that is called with the option's name and the value."""

    words: str
    check: Callable[[str, Any], Any]

    def __call__(self, field: str, given: Any) -> None:
        self.check(field, given)

    def __repr__(self) -> str:  # what `help` shows of an option: Annotated[int, 1 or more]
        return self.words


def first_number(step_size: StepSize) -> float | None:
    """The step size at step 0, the largest of a schedule that falls; None where it is traced and thus not known."""
    with jax.ensure_compile_time_eval():  # a method may be made where something else is traced
        number = step_size_at(step_size, 0)
        try:
            return float(number)
        except jax.errors.ConcretizationTypeError:
            return None


def check_share(field: str, given: StepSize) -> None:
    """Refuse a number, or a schedule that starts, at 0 or below or above 1."""
    check_step_size(field, given)
    first = first_number(given)
    if first is not None and first > 1:
        raise InvalidInput(field, first, "at most 1")


Whole = Annotated[int, Range("0 or more", partial(check_integer, minimum=0))]
Count = Annotated[int, Range("1 or more", partial(check_integer, minimum=1))]
OptionalCount = Annotated[int | None, Range("1 or more, or None", partial(check_integer, minimum=1, optional=True))]
Positive = Annotated[Number, Range("above 0", check_positive)]
OptionalPositive = Annotated[Number | None, Range("above 0, or None", partial(check_positive, optional=True))]
NonNegative = Annotated[Number, Range("0 or more", check_nonnegative)]
Probability = Annotated[float, Range("from 0 to 1", check_probability)]
Rate = Annotated[StepSize, Range("above 0: a number, or a schedule", check_step_size)]
Share = Annotated[StepSize, Range("above 0 and at most 1: a number, or a schedule", check_share)]
