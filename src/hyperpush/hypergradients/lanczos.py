"""The Lanczos method: both ends of the spectrum of a symmetric matrix, from products with it.

C. Lanczos, "An iteration method for the solution of the eigenvalue problem of linear differential and integral
operators", 1950, with full reorthogonalization.
"""

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from scipy.linalg import eigvalsh_tridiagonal


class Lanczos(eqx.Module):
    """State of the Lanczos method: the orthonormal vectors so far, the next one, and the tridiagonal matrix."""

    basis: Float[Array, "*clients k d"]
    vector: Float[Array, "*clients d"]
    diagonal: Float[Array, "*clients k"]
    beside: Float[Array, "*clients k"]

    @staticmethod
    def start(vector: Float[Array, " d"], steps: int) -> "Lanczos":
        """Return the state before the first of `steps` steps, from a random vector."""
        none = jnp.zeros(steps, vector.dtype)
        return Lanczos(jnp.zeros((steps, vector.size), vector.dtype), vector / jnp.linalg.norm(vector), none, none)

    def advance(self, image: Float[Array, " d"], number: Int[Array, ""] | int) -> "Lanczos":
        """Return the state after step `number`; `image` is the product of the matrix with `vector`."""
        basis = self.basis.at[number].set(self.vector)
        vector, size = _rest(image, basis)
        diagonal = self.diagonal.at[number].set(self.vector @ image)
        return Lanczos(basis, vector, diagonal, self.beside.at[number].set(size))

    def ends(self, error: float | None = None) -> tuple[float, float]:
        """Return the smallest and the largest eigenvalue, approached from inside; nan if a product was not finite.

        `error` is the relative error of the products; None stands for rounding errors of the float type.
        """
        diagonal, beside = (np.asarray(part, np.float64) for part in (self.diagonal, self.beside))
        if not np.all(np.isfinite(diagonal)):
            return np.nan, np.nan
        # Where the tridiagonal matrix splits up to rounding, the later steps found nothing new.
        rounding = error or (1e-6 if self.diagonal.dtype == jnp.float32 else 1e-10)
        small = np.flatnonzero(beside <= rounding * np.max(np.abs(diagonal)))
        steps = small[0] + 1 if len(small) else len(diagonal)
        values = eigvalsh_tridiagonal(diagonal[:steps], beside[: steps - 1])
        return float(values[0]), float(values[-1])


def _rest(vector: Float[Array, " d"], basis: Float[Array, "k d"]) -> tuple[Float[Array, " d"], Float[Array, ""]]:
    """Return the part of a vector outside of the basis, scaled to length 1, and its length before scaling."""
    for _ in range(2):  # one pass loses orthogonality to rounding
        vector = vector - (basis @ vector) @ basis
    size = jnp.linalg.norm(vector)
    return vector / jnp.where(size > 0, size, 1), size
