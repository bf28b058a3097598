"""Compute digests of a task's costs and data. A run stores them, so that loading it with another task is detected."""

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
    """Return a digest of each cost, of each data set, and of the initial params and hypers of a task, by name.

    Params or hypers named in `saved` are left out, because they are read back from files. Data of private tasks are
    left out, because a digest of them would be a release without noise. Numbers are converted to 32 bits first, so that
    float64 and float32 give the same digest.
    """
    found = {name: fingerprint(part) for name in COSTS if (part := getattr(task, name)) is not None}
    parts = {name: getattr(task, name) for name in ("params", "hypers") if name not in saved}
    if task.privacy is None:
        parts |= task.data.sets
    rows = task.clients if task.owner is None else 1
    return found | {name: values_digest(_plain(tree, task.owner is not None), rows) for name, tree in parts.items()}


def _plain(tree: PyTree, alone: bool) -> PyTree:
    """Return a tree with 64-bit numbers converted to 32 bits and with clients on axis 0."""
    if alone:
        tree = jax.tree.map(lambda leaf: leaf[None], tree)
    kinds = {np.dtype(np.float64): jnp.float32, np.dtype(np.int64): jnp.int32}
    return jax.tree.map(lambda leaf: leaf.astype(kinds[leaf.dtype]) if leaf.dtype in kinds else leaf, tree)


def check_same_task(path: Path, kept: Mapping[str, str], task: Task, changed: Sequence[str]) -> None:
    """Raise InvalidInput if costs or data of a task differ from those of a run, except for the names in `changed`."""
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
