"""Which arrays of a large state the next chunk may overwrite: those that nobody else holds."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import PyTree

LARGE = 1 << 28  # bytes of all states from which on it is worth it


def parted(tree: PyTree, kept: PyTree) -> tuple[PyTree, PyTree]:
    """The arrays that may not be overwritten, as `kept` or others here share their memory; and those that may.

    Both have the structure of `tree`, with None in place of what is in the other.
    """
    leaves, structure = jax.tree.flatten(tree)
    counted = Counter(place for leaf in leaves for place in _memory(leaf))
    taken = {place for leaf in jax.tree.leaves(kept) for place in _memory(leaf)}
    free = [
        bool(places := _memory(leaf)) and not any(place in taken or counted[place] > 1 for place in places)
        for leaf in leaves
    ]
    rest = [None if spent else leaf for leaf, spent in zip(leaves, free, strict=True)]
    used = [leaf if spent else None for leaf, spent in zip(leaves, free, strict=True)]
    return structure.unflatten(rest), structure.unflatten(used)


def _memory(leaf: Any) -> list[int]:
    """Where an array lies; nothing for what is not an array or has no elements."""
    if not isinstance(leaf, jax.Array) or leaf.size == 0 or jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return []
    return [shard.data.unsafe_buffer_pointer() for shard in leaf.addressable_shards]


def both_ways(f: Callable[..., Any]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """f(options, static, carry, …) compiled; and compiled to overwrite what it is given as a second argument."""

    def overwriting(given: tuple[Any, ...], spent: PyTree) -> Any:
        options, static, rest, *arguments = given
        return f(options, static, eqx.combine(rest, spent), *arguments)

    return eqx.filter_jit(f), eqx.filter_jit(overwriting, donate="all-except-first")
