"""Numbers that fall as a power of the round, for steps and for noise."""

from typing import Any

import equinox as eqx

from hyperpush.checks import positive
from hyperpush.errors import InvalidInput


class Power(eqx.Module):
    """`scale`/(t + 1)^`exponent` at round t, for traced numbers, plain ones and NumPy arrays."""

    scale: float = eqx.field(static=True, converter=float)
    exponent: float = eqx.field(static=True, converter=float, default=0.0)

    def __check_init__(self):
        positive("Power.scale", self.scale)
        if not 0 <= self.exponent < float("inf"):
            raise InvalidInput("Power.exponent", self.exponent, "a finite number, 0 or more")

    def __call__(self, t: Any) -> Any:
        return self.scale / (t + 1) ** self.exponent

    def times(self, factor: float) -> "Power":
        """The same schedule, `factor` times as large."""
        return Power(self.scale * positive("factor", factor), self.exponent)
