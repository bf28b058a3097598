"""Explain a result far from a solution by a column of the training data that is much larger than the others."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from hyperpush.base import processes
from hyperpush.base.status import Status
from hyperpush.data.batches import Numbered, Ragged
from hyperpush.task.task import Task

# Curvature grows with the square of a column, so the largest square determines the condition number.
LARGER = 1e6  # a column is large if its mean square exceeds this multiple of the other columns' median mean square
FAR = ("unsolved", "limit", "stalled", "inaccurate", "ill-posed", "growing", "diverged")


def with_hint(status: Status, task: Task) -> Status:
    """Return the status; if the result is far from a solution, add a hint that names a much larger column, if any."""
    if status.converged is not False or status.reason not in FAR or not (found := large_column(task)):
        return status
    return replace(status, hint=found)


def large_column(task: Task) -> str:
    """Return a sentence that names a column of the training data much larger than the others; empty if none is."""
    if task.privacy is not None or processes.count() > 1:
        return ""
    examples = task.data.train
    examples = examples.examples if isinstance(examples, Ragged) else examples
    examples = examples.examples if isinstance(examples, Numbered) else examples
    for path, leaf in jax.tree_util.tree_leaves_with_path(examples):
        columns = 2 if task.owner is None else 1
        if leaf.ndim == columns + 1 and leaf.shape[-1] > 1 and jnp.issubdtype(leaf.dtype, jnp.floating):
            squares = np.mean(np.square(np.asarray(leaf, np.float64)), axis=tuple(range(columns)))
            if said := _describe(squares, jax.tree_util.keystr(path)):
                return said
    return ""


def _describe(squares: np.ndarray, path: str) -> str:
    number = int(np.argmax(squares))
    others = np.delete(squares, number)
    typical = float(np.median(others[others > 0])) if np.any(others > 0) else 0.0
    if not typical or squares[number] < LARGER * typical:
        return ""
    ratio = np.sqrt(squares[number] / typical)
    return f"column {number} of task.train{path} is {ratio:.0e} times larger than the others: scale it"
