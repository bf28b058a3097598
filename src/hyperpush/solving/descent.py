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
        """Before the first step; Ritz values are known of the first `room` steps."""
        return Descent(residual, residual, Tridiagonal.start(room, residual.dtype))

    @property
    def size(self) -> Float[Array, ""]:
        return jnp.linalg.norm(self.residual)

    def curvature(self, image: Float[Array, " d"]) -> Float[Array, ""]:
        """pᵀHp / pᵀp."""
        squared = self.direction @ self.direction
        return (self.direction @ image) / jnp.where(squared > 0, squared, 1)

    def advance(self, image: Float[Array, " d"]) -> tuple["Descent", Float[Array, ""]]:
        """After a step, and its length α; `image` is the direction's."""
        squared, slope = self.residual @ self.residual, self.direction @ image
        length = squared / jnp.where(slope > 0, slope, 1)
        residual = self.residual - length * image
        ratio = (residual @ residual) / jnp.where(squared > 0, squared, 1)
        return Descent(residual, residual + ratio * self.direction, self.ritz.append(length, ratio)), length
