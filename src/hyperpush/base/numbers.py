"""Numbers of a method: Python floats in the method, traced where an engine compiles it."""

from typing import Any

from jaxtyping import Array, Float

from hyperpush.base.checks import is_number

Number = float | Float[Array, ""]


def as_number(given: Any) -> Any:
    """The converter of fields that are numbers: whole ones become floats; what is traced, or no number, stays."""
    return float(given) if is_number(given) else given
