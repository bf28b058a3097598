"""Detect a diverging run from one party's own data: its costs or its hypergradient have grown enormously.

Peers do not compute an average that shows whether params solve the problem. A party therefore compares its own costs
with their values at the start of the run, and its hypergradient with a bound.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from hyperpush.data.batches import full_batch
from hyperpush.task.problem import JointCost
from hyperpush.task.task import Task

GROWTH = 1e6  # a cost above this multiple of its start, or a hypergradient above this multiple of its bound, has grown


def grown_cost(before: Task, after: Task) -> str:
    """Return a message if a cost of one party's data exceeds a million times its start, else an empty string.

    Private tasks are not checked: the message would reveal a cost.
    """
    if before.owner is None or before.privacy is not None:
        return ""
    for (name, old), (_, new) in zip(_own_costs(before), _own_costs(after), strict=True):
        if not abs(new) <= GROWTH * max(abs(old), 1.0):
            return f"the {name} cost of this party's data grew from {old:.3g} to {new:.3g}"
    return ""


def _own_costs(task: Task) -> list[tuple[str, float]]:
    problem, data = task.problem, task.data
    found = [("inner", problem.inner_cost(task.params, task.hypers, full_batch(data.train)))]
    if not isinstance(problem.outer, JointCost):
        found.append(("outer", problem.outer_cost(task.params, task.hypers, full_batch(data.outer))))
    return [(name, float(value)) for name, value in found]


def grown_estimate(task: Task, value: PyTree) -> str:
    """Return a message if a party's hypergradient exceeds a million times a bound on its parts, else an empty string.

    A hypergradient is the outer gradient in the hypers, minus the mixed derivative times the solution of a linear
    system. The right side of this system is the outer gradient in the params. The bound takes the square of the party's
    largest training value, or 1 if that is larger, for the mixed derivative.
    """
    if task.owner is None or task.privacy is not None or isinstance(task.problem.outer, JointCost):
        return ""
    batch = full_batch(task.data.outer)
    parts = task.problem.outer_gradients(task.params, task.hypers, batch)
    scale = max(1.0, *(_largest(each) for each in parts)) * max(1.0, _largest(task.data.train)) ** 2
    size = _largest(value)
    return "" if size <= GROWTH * scale else f"the hypergradient is {size:.3g}, and its parts are {scale:.3g}"


def _largest(tree: PyTree) -> float:
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(tree) if hasattr(leaf, "dtype")]
    real = [leaf for leaf in leaves if leaf.size and jnp.issubdtype(leaf.dtype, jnp.floating)]
    return max((float(np.max(np.abs(leaf))) for leaf in real), default=0.0)
