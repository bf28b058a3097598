"""Random keys derived from the key of a run: for the program's draws, the network's random links and the faults."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray


def program_key(key: PRNGKeyArray) -> PRNGKeyArray:
    return jax.random.fold_in(key, np.uint32(0))


def network_key(key: PRNGKeyArray) -> PRNGKeyArray:
    return jax.random.fold_in(key, np.uint32(1))


def faults_key(key: PRNGKeyArray) -> PRNGKeyArray:
    return jax.random.fold_in(key, np.uint32(2))


def as_bits(leaf: Any) -> Any:
    """Return the integers of a random key; return any other array, or shape of an array, unchanged."""
    if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return leaf
    return jax.random.key_data(leaf) if isinstance(leaf, jax.Array) else jax.eval_shape(jax.random.key_data, leaf)


def from_bits(bits: Array, dtype: Any) -> Array:
    """Return the array of type `dtype` from the result of `as_bits`."""
    if not jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return bits
    return jax.random.wrap_key_data(bits, impl=str(jax.random.key_impl(jnp.zeros((), dtype))))
