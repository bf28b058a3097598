"""Conjugate gradients on one right-hand side."""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

from hyperpush.solving.ritz import Tridiagonal


class Descent(eqx.Module):
    """State of conjugate gradients on one right-hand side: the residual and the direction, but not the iterate."""

    residual: Float[Array, " d"]
    direction: Float[Array, " d"]
    ritz: Tridiagonal

    @staticmethod
    def start(residual: Float[Array, " d"], room: int) -> "Descent":
        """Return the state before the first step, with room for the Ritz values of `room` steps."""
        return Descent(residual, residual, Tridiagonal.start(room, residual.dtype))

    @property
    def size(self) -> Float[Array, ""]:
        return jnp.linalg.norm(self.residual)

    def curvature(self, image: Float[Array, " d"]) -> Float[Array, ""]:
        """Return the curvature pᵀHp / pᵀp along the direction p; `image` is Hp."""
        squared = self.direction @ self.direction
        return (self.direction @ image) / jnp.where(squared > 0, squared, 1)

    def advance(self, image: Float[Array, " d"]) -> tuple["Descent", Float[Array, ""]]:
        """Return the state after a step, and the step's length α; `image` is H times the direction."""
        squared, slope = self.residual @ self.residual, self.direction @ image
        length = squared / jnp.where(slope > 0, slope, 1)
        residual = self.residual - length * image
        ratio = (residual @ residual) / jnp.where(squared > 0, squared, 1)
        return Descent(residual, residual + ratio * self.direction, self.ritz.append(length, ratio)), length
