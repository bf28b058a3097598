"""Define the type of a method's numbers: Python floats, which become traced arrays in compiled code."""

from typing import Any

from jaxtyping import Array, Float

from hyperpush.base.checks import is_number

Number = float | Float[Array, ""]


def as_number(given: Any) -> Any:
    """Convert a Python or NumPy number to a float; traced numbers and other values stay as they are."""
    return float(given) if is_number(given) else given
