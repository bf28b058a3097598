"""Evaluate all clients' costs once at the start of a run, and raise InvalidInput if a loss is NaN or infinite."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from hyperpush.base import processes
from hyperpush.base.errors import InvalidInput
from hyperpush.data.batches import capacity, full_batch, open_batch
from hyperpush.engines.base import ambient
from hyperpush.engines.compiled.compile import call
from hyperpush.engines.compiled.effort import level_of_one_run
from hyperpush.programs.recipe import with_arrays
from hyperpush.task.problem import JointCost, Problem
from hyperpush.task.task import Task

HINT = "finite losses (do labels start at 1? is a logarithm or a division taken of 0?)"


def check_first_costs(task: Task) -> None:
    """Raise InvalidInput if a loss is NaN or infinite at the task's params; the message names client and example.

    A NaN loss often has a finite gradient, so training would continue and end at a wrong point. Private tasks are not
    checked, because the message would reveal an example. The check takes one forward pass over all data.
    """
    if task.privacy is not None or processes.count() > 1 or ambient().engine is not None:
        return
    given = (task.problem, task.params, task.hypers, task.data)
    if task.owner is not None:
        given = (given[0], *jax.tree.map(lambda leaf: leaf[None], given[1:]))
    for field, (bad, scalar) in call(_look, with_arrays(given), level=level_of_one_run).items():
        found = np.asarray(bad)
        if found.any():
            _refuse(task, field, found, bool(np.all(scalar)))


def _look(given: tuple[Any, ...], donated: PyTree) -> dict[str, tuple[Array, Array]]:
    """Return, for each cost, a mask [clients, examples] of non-finite losses, and whether the loss is a scalar."""
    problem, params, hypers, data = given

    def of_client(own: tuple[PyTree, ...]) -> dict[str, tuple[Array, Array]]:
        x, hyper, sets = own
        costs = {"inner": (problem.inner, sets.train)}
        if not isinstance(problem.outer, JointCost):
            costs["outer"] = (problem.outer, sets.outer)
        found = {field: _bad(problem, cost, x, hyper, examples) for field, (cost, examples) in costs.items()}
        for field, penalty in (("penalty", problem.penalty), ("outer_penalty", problem.outer_penalty)):
            if penalty is not None:
                found[field] = (~jnp.isfinite(jnp.atleast_1d(penalty(problem.whole(x), hyper))), jnp.ones((), bool))
        return found

    return jax.lax.map(of_client, (params, hypers, data))


def _bad(problem: Problem, cost: Any, params: PyTree, hyper: PyTree, examples: PyTree) -> tuple[Array, Array]:
    batch = full_batch(examples)
    losses = jnp.asarray(problem._losses(cost, params, hyper, batch))
    bad, mask = ~jnp.isfinite(losses), open_batch(batch)[1]
    scalar = losses.ndim == 0
    if scalar:
        return bad[None], jnp.ones((), bool)
    assert len(bad) == capacity(examples)
    return bad if mask is None else bad & (mask > 0), jnp.zeros((), bool)


def _refuse(task: Task, field: str, bad: np.ndarray, scalar: bool) -> None:
    clients = np.flatnonzero(bad.any(axis=1))
    name = task.names[clients[0] if task.owner is None else task.owner]
    if scalar or field.endswith("penalty"):
        given = f"a NaN or infinite value at {len(clients)} of {len(bad)} clients at the start, first at client {name}"
    else:
        example = int(np.argmax(bad[clients[0]]))
        given = (
            f"NaN or infinite losses in {bad.sum()} examples at the start, first at client {name}, example {example}"
        )
    raise InvalidInput(f"task.{field}", given, HINT)
