"""Mark arrays in a trace with the promise that each row is a different example.

The privacy of a release depends on this promise. An example that is in a batch twice changes the batch's mean twice as
much. So does an example whose inputs and targets are in different rows. The promise is needed because a trace of a
gather does not show that its indices are distinct.
"""

from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import PyTree


def promise_single(batch: PyTree) -> PyTree:
    """Return the same arrays, with the promise that row i (axis 0) of all arrays is one example, in this row only."""
    leaves, structure = jax.tree.flatten(batch)
    return structure.unflatten(single.bind(*leaves, lead=0))


def _map(leaves: Any, axes: Any, *, lead: int) -> tuple[list[Any], list[int]]:
    wide = next(leaf.shape[axis] for leaf, axis in zip(leaves, axes, strict=True) if axis is not None)
    every = [batching.bdim_at_front(leaf, axis, wide) for leaf, axis in zip(leaves, axes, strict=True)]
    return single.bind(*every, lead=lead + 1), [0] * len(every)


single = Primitive("hyperpush_single_examples")
single.multiple_results = True
single.def_impl(lambda *leaves, **_: list(leaves))
single.def_abstract_eval(lambda *leaves, **_: list(leaves))
mlir.register_lowering(single, lambda ctx, *leaves, **_: leaves)
batching.primitive_batchers[single] = _map
ad.primitive_jvps[single] = lambda primals, tangents, **params: (single.bind(*primals, **params), tangents)
