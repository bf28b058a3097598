"""Compute the smallest Ritz value of conjugate gradients after any step.

Conjugate gradients with step lengths α_k and ratios β_k factor the tridiagonal matrix of Lanczos as T = L D Lᵀ. Here
D = diag(1/α_k), and L is unit bidiagonal with L_{k+1,k} = √β_k. The eigenvalues of T (Ritz values) approach those of
the matrix from inside.
"""

from dataclasses import replace

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

SHIFTS = 32  # shifts per sweep, a power of two; 3 sweeps narrow sixteen orders of magnitude to a tenth of a percent
SWEEPS = 3


class Tridiagonal(eqx.Module):
    """The part of the tridiagonal matrix T from the steps so far, with room for a fixed number of steps."""

    pivots: Float[Array, " k"]  # 1/α
    ratios: Float[Array, " k"]  # β
    count: Int[Array, ""]
    least: Float[Array, ""]  # smallest entry of T's diagonal: an upper bound of the smallest eigenvalue
    most: Float[Array, ""]  # a bound of the largest eigenvalue (Gershgorin)

    @staticmethod
    def start(room: int, dtype: jnp.dtype) -> "Tridiagonal":
        zeros, zero = jnp.zeros(room, dtype), jnp.zeros((), dtype)
        return Tridiagonal(zeros, zeros, jnp.zeros((), jnp.int32), zero, zero)

    def append(self, length: Float[Array, ""], ratio: Float[Array, ""]) -> "Tridiagonal":
        """Return T after a step of this length α and ratio β; without room the step is ignored."""
        k, pivot = self.count, 1 / length
        full = k >= self.pivots.size
        last = jnp.where(k > 0, self.ratios[k - 1] * self.pivots[k - 1], 0)  # β/α of the step before
        beside = jnp.where(k > 0, jnp.sqrt(self.ratios[k - 1]) * self.pivots[k - 1], 0)
        diagonal = pivot + last
        return replace(
            self,
            pivots=self.pivots.at[k].set(pivot, mode="drop"),
            ratios=self.ratios.at[k].set(ratio, mode="drop"),
            count=jnp.where(full, k, k + 1),
            least=jnp.where(k > 0, jnp.minimum(self.least, jnp.where(full, jnp.inf, diagonal)), diagonal),
            most=jnp.maximum(self.most, jnp.where(full, 0, diagonal + beside + jnp.sqrt(ratio) * pivot)),
        )

    def smallest(self, floor: Float[Array, ""]) -> Float[Array, ""]:
        """Return the smallest eigenvalue of T, too small by at most a tenth of a percent; at least `floor`."""
        least = jnp.finfo(floor.dtype).eps ** 2 * self.most  # keeps the quotient of the bounds finite
        low = jnp.maximum(floor, least)
        high = jnp.maximum(self.least, low)

        def narrow(_, bounds):
            low, high = bounds
            shifts = _between(low, high)
            above = jnp.argmax(self._has_below(shifts).at[-1].set(True))  # the first shift above the eigenvalue
            return shifts[jnp.maximum(above - 1, 0)], shifts[above]

        return jax.lax.fori_loop(0, SWEEPS, narrow, (low, high))[0]

    def _has_below(self, shifts: Float[Array, " s"]) -> Array:
        """Return True for each shift at which T − shift·I has a negative pivot.

        The stationary qd transform (Parlett and Dhillon 2000) works on the factors of T, because T itself has lost the
        small eigenvalues to rounding.
        """

        def step(k, held):
            rest, found = held
            pivot = rest + self.pivots[k]
            safe = jnp.where(pivot == 0, jnp.finfo(pivot.dtype).tiny, pivot)
            rest = rest * (self.ratios[k] * self.pivots[k] / safe) - shifts
            return rest, found | (pivot < 0)

        first = (-shifts, jnp.zeros(shifts.shape, bool))
        return jax.lax.fori_loop(0, self.count, step, first)[1]


def _between(low: Float[Array, ""], high: Float[Array, ""]) -> Float[Array, " s"]:
    """Return `SHIFTS` + 1 numbers from low to high in equal ratios, without a power, which compiles slowly."""
    place, factor, bit = jnp.arange(SHIFTS + 1), high / low, SHIFTS
    numbers = jnp.full(SHIFTS + 1, low)
    while bit:
        numbers *= jnp.where(place & bit, factor, 1)
        factor, bit = jnp.sqrt(factor), bit // 2
    return numbers
