"""Numbers of a method: Python floats in the method, traced where an engine compiles it."""

from typing import Any

from jaxtyping import Array, Float

from hyperpush.base.checks import is_number

Number = float | Float[Array, ""]


def as_number(given: Any) -> Any:
    """Convert a field that is a number to a float; traced numbers and other values stay as they are."""
    return float(given) if is_number(given) else given
