"""Digests of a task's costs and data, kept with a run to detect its continuation on another task."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from hyperpush.base.errors import InvalidInput, unknown
from hyperpush.base.fingerprint import fingerprint
from hyperpush.runs.checkpoints.journal import values_digest
from hyperpush.task.task import Task

COSTS = ("inner", "outer", "penalty", "outer_penalty")


def digests_of(task: Task, saved: Sequence[str] = ()) -> dict[str, str]:
    """Return a digest of each cost, data set and start of a task, by name.

    Starts in `saved` are left out, because they are read back from files. Data of private tasks are left out, because
    a digest lacks noise. Numbers count as float32, so that a run in float64 is recognized in float32.
    """
    found = {name: fingerprint(part) for name in COSTS if (part := getattr(task, name)) is not None}
    parts = {name: getattr(task, name) for name in ("params", "hypers") if name not in saved}
    if task.privacy is None:
        parts |= task.data.sets
    rows = task.clients if task.owner is None else 1
    return found | {name: values_digest(_plain(tree, task.owner is not None), rows) for name, tree in parts.items()}


def _plain(tree: PyTree, alone: bool) -> PyTree:
    """Return a tree in 32 bits with clients on axis 0."""
    if alone:
        tree = jax.tree.map(lambda leaf: leaf[None], tree)
    kinds = {np.dtype(np.float64): jnp.float32, np.dtype(np.int64): jnp.int32}
    return jax.tree.map(lambda leaf: leaf.astype(kinds[leaf.dtype]) if leaf.dtype in kinds else leaf, tree)


def check_same_task(path: Path, kept: Mapping[str, str], task: Task, changed: Sequence[str]) -> None:
    """Refuse a task whose costs or data differ from those of a run, but for the names in `changed`."""
    known = (*COSTS, "params", "hypers", *task.data.sets)
    if isinstance(changed, str) or not isinstance(changed, Sequence):
        raise InvalidInput("changed", changed, "a list of names, such as ['train']")
    for name in changed:
        if name not in known:
            raise unknown("changed", str(name), known)
    now = digests_of(task, saved=[name for name in ("params", "hypers") if name not in kept])
    different = [name for name in {**kept, **now} if kept.get(name) != now.get(name) and name not in changed]
    if different:
        names = ", ".join(different)
        allowed = f"the task of {path}; changed={different!r} continues from it with other parts on purpose"
        raise InvalidInput("task", f"a task with other {names}", allowed)
