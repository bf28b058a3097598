"""Helpers of the solvers on exact averages."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PyTree

from hyperpush.programs import Context

ROUNDING = 8  # curvatures below this multiple of the rounding of the largest curvature count as zero


def choose(first: Bool[Array, ""], one: PyTree, other: PyTree) -> PyTree:
    """Return `one` if `first` is True, else `other`; leaves that both share stay the same array."""
    return jax.tree.map(lambda a, b: a if a is b else jnp.where(first, a, b), one, other)


def probe_of(size: int, dtype: Any, ctx: Context) -> Float[Array, " d"]:
    """Return a random right-hand side, the same at every client.

    It has components in directions in which the true right-hand side is zero. It is drawn from the run's key, so it
    differs between runs.
    """
    assert ctx.common_key is not None
    return jax.random.normal(ctx.common_key, (size,), dtype)
