"""A function of one client for all clients of a block, a few at a time."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.extend.core import Var, jaxpr_as_fun
from jaxtyping import Array, PyTree


def rowwise(f: Callable[[PyTree, PyTree], PyTree], states: PyTree, others: PyTree, batch: int) -> PyTree:
    """`f(state, other)` for every row of both, `batch` rows at a time.

    What `f` hands through is not touched, and what it makes of a leaf of the state is written over that leaf, row by
    row: a loop over rounds then holds and moves every array once.
    """
    given, structure = jax.tree.flatten((states, others))
    example = [jax.ShapeDtypeStruct(array.shape[1:], array.dtype) for array in given]
    traced, shapes = jax.make_jaxpr(lambda *row: f(*structure.unflatten(row)), return_shape=True)(*example)
    leaves, made = jax.tree.flatten(shapes)
    inputs = {variable: place for place, variable in enumerate(traced.jaxpr.invars)}
    handed = [inputs.get(out) if isinstance(out, Var) else None for out in traced.jaxpr.outvars]
    results = [None if place is None else given[place] for place in handed]
    fresh = [place for place, source in enumerate(handed) if source is None]
    over = set()
    if made == jax.tree.structure(states):
        over = {k for k in fresh if k not in handed and (leaves[k].shape, leaves[k].dtype) == _kind(example[k])}
    if fresh:
        for place, result in _loop(jaxpr_as_fun(traced), given, fresh, over, batch).items():
            results[place] = result
    return made.unflatten(results)


def _kind(leaf: jax.ShapeDtypeStruct) -> tuple:
    return leaf.shape, leaf.dtype


def _loop(f: Callable[..., list], given: list[Array], fresh: list[int], over: set[int], batch: int) -> dict[int, Array]:
    """The results `fresh` of f(*one row) for all rows; those in `over` take the place of the input of that number."""
    rows = given[0].shape[0]
    batch = min(batch, rows)
    first = rows // batch * batch

    one = batch == 1  # without an axis for the one row: XLA would copy everything to add it
    compute = f if one else jax.vmap(f)

    def read(array, i):
        if one:
            return jax.lax.dynamic_index_in_dim(array, i, keepdims=False)
        return jax.lax.dynamic_slice_in_dim(array, i * batch, batch)

    def write(array, new, i):
        put = jax.lax.dynamic_update_index_in_dim if one else jax.lax.dynamic_update_slice_in_dim
        return put(array, new, i * batch, 0)

    def divided(array):
        return array if one else array[:first].reshape(rows // batch, batch, *array.shape[1:])

    def step(held, slices):
        i, row = slices
        new = compute(*[read(held[k], i) if k in over else part for k, part in enumerate(row)])
        return {k: write(array, new[k], i) for k, array in held.items()}, {k: new[k] for k in fresh if k not in over}

    rest = [None if k in over else divided(array) for k, array in enumerate(given)]
    held, anew = jax.lax.scan(step, {k: given[k] for k in over}, (jnp.arange(rows // batch), rest))
    if batch > 1:
        anew = {k: array.reshape(first, *array.shape[2:]) for k, array in anew.items()}
    if first < rows:
        last = jax.vmap(f)(*[array[first:] for array in given])
        held = {k: array.at[first:].set(last[k]) for k, array in held.items()}
        anew = {k: jnp.concatenate([array, last[k]]) for k, array in anew.items()}
    return held | anew
