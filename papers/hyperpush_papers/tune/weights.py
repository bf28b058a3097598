"""Constants for privacy of the task with weights of training examples (`hp.tasks.cleaning`)."""

import math
from collections.abc import Callable

from hyperpush.privacy.sensitivity import Constants


def constants(l2: float) -> Callable[[float, float], Constants]:
    """Return constants for inputs of ℓ2 norm at most 1, from the clipping bound of gradients and the radius of z.

    With p the softmax and H = diag(p) − ppᵀ: ‖∂ℓ‖ ≤ √2, ‖H‖ ≤ ½, and H changes by at most 3/2 per unit of scores.
    """

    def bounds(clip: float, radius: float) -> Constants:
        slope, bend = 1 / 4, 1 / (6 * math.sqrt(3))  # the largest first and second derivative of σ
        return Constants(
            C_y=clip,
            C_b=clip,
            C_x=0.0,
            R=radius,
            C_H=1 / 2 + l2,
            C_J=slope * math.sqrt(2),
            L_H=3 / 2 + slope / 2,
            L_J=slope / 2 + bend * math.sqrt(2),
            L_b=1 / 2,
            L_fx=0.0,
        )

    return bounds
