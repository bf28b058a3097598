"""Apply a function of one client to all clients of a block, a few at a time."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.extend.core import Var, jaxpr_as_fun
from jaxtyping import Array, PyTree


def map_clients(f: Callable[[PyTree, PyTree], PyTree], states: PyTree, others: PyTree, batch: int) -> PyTree:
    """Return `f(state, other)` for each row of `states` and `others`, computed `batch` rows at a time.

    Arrays that `f` returns unchanged are not copied. New values of a leaf of the state overwrite that leaf, row by row.
    So a loop over rounds holds every array only once.
    """
    given, structure = jax.tree.flatten((states, others))
    example = [jax.ShapeDtypeStruct(array.shape[1:], array.dtype) for array in given]
    traced, shapes = jax.make_jaxpr(lambda *row: f(*structure.unflatten(row)), return_shape=True)(*example)
    leaves, made = jax.tree.flatten(shapes)
    inputs = {variable: place for place, variable in enumerate(traced.jaxpr.invars)}
    handed = [inputs.get(out) if isinstance(out, Var) else None for out in traced.jaxpr.outvars]
    results = [None if place is None else given[place] for place in handed]
    fresh = [place for place, source in enumerate(handed) if source is None]
    kinds = [[(leaf.shape, leaf.dtype) for leaf in some] for some in (leaves, example)]
    over = made == jax.tree.structure(states) and all(kinds[0][k] == kinds[1][k] and k not in handed for k in fresh)
    if fresh:
        for place, result in _loop(jaxpr_as_fun(traced), given, fresh, over, batch).items():
            results[place] = result
    return made.unflatten(results)


def _loop(f: Callable[..., list], given: list[Array], fresh: list[int], over: bool, batch: int) -> dict[int, Array]:
    """Return the results number `fresh` of `f`, for all rows, by their number.

    With `over` they overwrite the inputs at the same positions.
    """
    rows = given[0].shape[0]
    batch = min(batch, rows)
    first = rows // batch * batch

    one = batch == 1  # without an axis for the single row, because XLA would copy all arrays to add it

    def read(array, i):
        if one:
            return jax.lax.dynamic_index_in_dim(array, i, keepdims=False)
        return jax.lax.dynamic_slice_in_dim(array, i * batch, batch)

    def write(array, new, i):
        put = jax.lax.dynamic_update_index_in_dim if one else jax.lax.dynamic_update_slice_in_dim
        return put(array, new, i * batch, 0)

    def split(array):
        return array if one else array[:first].reshape(rows // batch, batch, *array.shape[1:])

    # XLA may fuse results of equal shape into one pass that writes some inputs before it reads others. Then it would
    # keep whole copies. A branch that is always taken forces it to read all rows first.
    alike = len({given[k].shape for k in fresh if over}) < len(fresh)

    def compute(row):
        new = (f if one else jax.vmap(f))(*row)
        return {k: new[k] for k in fresh}

    def overwrite(held, slices):
        i, rest = slices
        row = [read(held[k], i) if k in held else part for k, part in enumerate(rest)]
        new = compute(row) if not alike else jax.lax.cond(i >= 0, compute, lambda row: {k: row[k] for k in fresh}, row)
        return {k: write(array, new[k], i) for k, array in held.items()}, None

    if over:
        rest = [None if k in fresh else split(array) for k, array in enumerate(given)]
        found, _ = jax.lax.scan(overwrite, {k: given[k] for k in fresh}, (jnp.arange(rows // batch), rest))
    else:
        found = jax.lax.map(compute, [split(array) for array in given])
        if not one:
            found = {k: array.reshape(first, *array.shape[2:]) for k, array in found.items()}
    if first == rows:
        return found
    last = jax.vmap(f)(*[array[first:] for array in given])
    return {
        k: array.at[first:].set(last[k]) if over else jnp.concatenate([array, last[k]]) for k, array in found.items()
    }
