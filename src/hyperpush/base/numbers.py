"""Define the type of a method's numbers: Python floats, which become traced arrays when an engine compiles the method."""

from typing import Any

from jaxtyping import Array, Float

from hyperpush.base.checks import is_number

Number = float | Float[Array, ""]


def as_number(given: Any) -> Any:
    """Convert a Python or NumPy number to a float; traced numbers and other values stay as they are."""
    return float(given) if is_number(given) else given
