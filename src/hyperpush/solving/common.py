"""Small things that every solver on exact averages needs."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PyTree

from hyperpush.programs import Context

ROUNDING = 8  # curvatures below so many roundings of the largest are zero


def choose(first: Bool[Array, ""], one: PyTree, other: PyTree) -> PyTree:
    """One of two states. What both share stays the same array, which engines need not write."""
    return jax.tree.map(lambda a, b: a if a is b else jnp.where(first, a, b), one, other)


def probe_of(size: int, dtype: Any, ctx: Context) -> Float[Array, " d"]:
    """A random right-hand side, the same at every client: what the true one has no part in is not overlooked.

    It follows from the run's key, so no problem meets the same one in every run.
    """
    assert ctx.common_key is not None
    return jax.random.normal(ctx.common_key, (size,), dtype)
