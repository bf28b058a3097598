"""Make small arrays on the host, because JAX would compile a program for each shape."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array

SMALL = 1 << 24  # `copies` up to this size in bytes are made on the host
KEPT, MANY = 1 << 12, 256  # largest size in bytes of an array that is cached, and the largest number of such arrays


_filled: dict[Any, Array] = {}  # cached arrays of 0, 1 and −1, which most initial states contain


def filled(shape: int | tuple[int, ...], value: Any, dtype: Any = None) -> Array:
    """Return an array filled with one value; `dtype=None` takes JAX's float type. Small arrays are made only once."""
    kind = np.dtype(jnp.result_type(float) if dtype is None else dtype)
    key = (shape, value, kind, getattr(jax.config, "jax_default_device"))  # noqa: B009, JAX makes it when it runs
    found = _filled.get(key)
    if found is not None and not found.is_deleted():
        return found
    made = jax.device_put(np.full(shape, value, kind))
    usual = value in (0, 1, -1) and made.nbytes <= KEPT and len(_filled) < MANY
    if usual and not isinstance(made, Tracer):
        _filled[key] = made
    return made


def copies(leaf: Array, count: int) -> Array:
    """Return `count` copies of an array along a new first axis."""
    if leaf.nbytes * count > SMALL or jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jnp.repeat(leaf[None], count, axis=0)
    return jax.device_put(np.repeat(np.asarray(leaf)[None], count, axis=0))
