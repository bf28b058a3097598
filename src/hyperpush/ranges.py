"""Types of options that say in which range a value lies: `Configured` checks it when an object is made.

A range is a check in the metadata of the annotation, called with the option's name and the value. Type checkers see the
plain type.
"""

from functools import partial
from typing import Annotated

import jax

from hyperpush.checks import check_integer, check_nonnegative, check_positive, check_probability
from hyperpush.errors import InvalidInput
from hyperpush.method import Number
from hyperpush.optimizers import StepSize, check_step_size, step_size_at


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


Whole = Annotated[int, partial(check_integer, minimum=0)]
Count = Annotated[int, partial(check_integer, minimum=1)]
OptionalCount = Annotated[int | None, partial(check_integer, minimum=1, optional=True)]
Positive = Annotated[Number, check_positive]
OptionalPositive = Annotated[Number | None, partial(check_positive, optional=True)]
NonNegative = Annotated[Number, check_nonnegative]
Probability = Annotated[float, check_probability]
Rate = Annotated[StepSize, check_step_size]  # above 0: a number, or a schedule
Share = Annotated[StepSize, check_share]  # above 0 and at most 1: a number, or a schedule
