"""Small arrays made on the host: JAX would compile a program for each shape."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

SMALL = 1 << 24  # largest size in bytes that is copied on the host first


def filled(shape: int | tuple[int, ...], value: Any, dtype: Any = None) -> Array:
    """Return an array of one value, of JAX's float type unless a type is given."""
    return jax.device_put(np.full(shape, value, jnp.result_type(float) if dtype is None else dtype))


def copies(leaf: Array, count: int) -> Array:
    """Return `count` copies of an array along a new first axis."""
    if leaf.nbytes * count > SMALL or jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jnp.repeat(leaf[None], count, axis=0)
    return jax.device_put(np.repeat(np.asarray(leaf)[None], count, axis=0))
