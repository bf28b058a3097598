"""One right-hand side of conjugate gradients."""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

from hyperpush.solving.ritz import Tridiagonal


class Descent(eqx.Module):
    """Conjugate gradients on one right-hand side, without its solution."""

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
        """pᵀHp / pᵀp."""
        squared = self.direction @ self.direction
        return (self.direction @ image) / jnp.where(squared > 0, squared, 1)

    def advance(self, image: Float[Array, " d"]) -> tuple["Descent", Float[Array, ""]]:
        """Return the state after a step, and the step's length α; `image` is H times the direction."""
        squared, slope = self.residual @ self.residual, self.direction @ image
        length = squared / jnp.where(slope > 0, slope, 1)
        residual = self.residual - length * image
        ratio = (residual @ residual) / jnp.where(squared > 0, squared, 1)
        return Descent(residual, residual + ratio * self.direction, self.ritz.append(length, ratio)), length
