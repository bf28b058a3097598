"""Estimates that remember: corrected by the difference of two estimates on the same batch."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree


def at_both(estimate: Callable[[PyTree], PyTree], new: PyTree, old: PyTree) -> tuple[PyTree, PyTree]:
    """`estimate` at two points, side by side: what does not depend on the point, like a batch, is made once."""
    stacked = jax.vmap(estimate)(jax.tree.map(lambda a, b: jnp.stack([a, b]), new, old))
    here, before = (jax.tree.map(lambda leaf, k=k: leaf[k], stacked) for k in (0, 1))
    return here, before


def recursive(kept: PyTree, new: PyTree, old: PyTree, forget: Any = 0.0) -> PyTree:
    """new + (1 − forget)(kept − old), `new` and `old` on the same batch at this point and at the one before.

    Its noise is that of the difference, which vanishes with the step. STORM (Cutkosky, Orabona 2019) forgets a little
    each time; SPIDER (Fang, Li, Lin, Zhang 2018) nothing, and starts anew every so often.
    """
    return jax.tree.map(lambda k, n, o: (n + (1 - forget) * (k - o)).astype(k.dtype), kept, new, old)
