"""Counters that stay exact beyond 32 bits, in programs without 64-bit integers."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, UInt32

from hyperpush.base.arrays import filled

_BYTE = 8  # number of low bits that `plus_sum` sums separately, which is exact for up to 2²⁴ numbers


class Tally(eqx.Module):
    """A count, or an array of counts, stored in two 32-bit words."""

    low: UInt32[Array, "..."]
    high: UInt32[Array, "..."]

    @staticmethod
    def start(shape: int | tuple[int, ...] = (), value: int = 0) -> "Tally":
        """Return counts that begin at `value` ≥ 0."""
        return Tally(filled(shape, value & 0xFFFFFFFF, np.uint32), filled(shape, value >> 32, np.uint32))

    def plus(self, more: Int[Array, "..."] | int) -> "Tally":
        """Add numbers from 0 to 2³² − 1, given as 32-bit integers."""
        low = self.low + jnp.asarray(more).astype(jnp.uint32)
        return Tally(low, self.high + (low < self.low).astype(jnp.uint32))

    def plus_sum(self, numbers: Int[Array, " n"]) -> "Tally":
        """Add the sum of an array of 32-bit integers ≥ 0."""
        numbers = numbers.astype(jnp.uint32)
        rest = jnp.sum(numbers >> _BYTE, dtype=jnp.uint32)
        after = self.plus(jnp.sum(numbers & ((1 << _BYTE) - 1), dtype=jnp.uint32)).plus(rest << _BYTE)
        return Tally(after.low, after.high + (rest >> (32 - _BYTE)))

    def positive(self) -> Bool[Array, "..."]:
        """Return True for each count above 0."""
        return (self.low | self.high) > 0

    def signed(self) -> Int[Array, "..."]:
        """Return the lower word as a signed 32-bit integer, which repeats after 2³²."""
        return jax.lax.bitcast_convert_type(self.low, jnp.int32)

    def numbers(self) -> np.ndarray:
        """Return the counts as 64-bit integers on the host."""
        return (np.asarray(self.high).astype(np.int64) << 32) + np.asarray(self.low).astype(np.int64)


def from_words(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Return 64-bit integers from their lower and upper words."""
    return (high.astype(np.int64) << 32) + low.astype(np.int64)
