"""Checks of the step sizes of algorithms that have several."""

from typing import Any

import jax

from hyperpush.errors import InvalidInput
from hyperpush.optimizers import StepSize, check_step_size, step_size_at


def check_step_sizes(method: Any, *fields: str) -> None:
    """Refuse a field that holds neither a schedule nor a finite number above 0."""
    for field in fields:
        check_step_size(f"{type(method).__name__}.{field}", getattr(method, field))


def first_number(step_size: StepSize) -> float | None:
    """The step size at step 0, the largest of a schedule that falls; None where it is traced and thus not known."""
    with jax.ensure_compile_time_eval():  # a method may be made where something else is traced
        number = step_size_at(step_size, 0)
        try:
            return float(number)
        except jax.errors.ConcretizationTypeError:
            return None


def check_at_most_one(field: str, step_size: StepSize) -> None:
    """Refuse a number, or a schedule that starts, above 1."""
    first = first_number(step_size)
    if first is not None and first > 1:
        raise InvalidInput(field, first, "at most 1")
