"""Step sizes: a number, or a schedule by iteration such as `Power`."""

from collections.abc import Callable
from typing import Any

from jaxtyping import Array, Int

from hyperpush.checks import positive

Step = float | Callable[[Any], Any]


def check_step(field: str, given: object) -> None:
    """Refuse what is neither a schedule nor a finite number above 0."""
    if not callable(given):
        positive(field, given)


def step_at(step: Step, iteration: Int[Array, ""]) -> Any:
    """The step size of an iteration, counted from 0."""
    return step(iteration) if callable(step) else step
