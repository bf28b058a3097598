"""Helpers of the solvers on exact averages."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PyTree

from hyperpush.programs import Context

ROUNDING = 8  # curvatures below this multiple of the largest one's rounding count as zero


def choose(first: Bool[Array, ""], one: PyTree, other: PyTree) -> PyTree:
    """Return one of two states. Leaves that both share stay the same array, which engines need not write."""
    return jax.tree.map(lambda a, b: a if a is b else jnp.where(first, a, b), one, other)


def probe_of(size: int, dtype: Any, ctx: Context) -> Float[Array, " d"]:
    """Return a random right-hand side, the same at every client.

    It reaches directions in which the true one is zero. It is drawn from the run's key, so it differs between runs.
    """
    assert ctx.common_key is not None
    return jax.random.normal(ctx.common_key, (size,), dtype)
