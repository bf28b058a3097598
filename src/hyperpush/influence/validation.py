"""Make tasks whose estimate has several right-hand sides: all validation losses, single examples, or single clients."""

from collections.abc import Iterable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from hyperpush.base.errors import InvalidInput
from hyperpush.data.batches import Batch, BatchCost, count
from hyperpush.data.sets import example_counts
from hyperpush.influence.stacked import Pulled, Summed, over_runs, repeat_params, take_weights
from hyperpush.influence.weights import Chosen, Place, Weights, check_place, check_single_losses, of_part
from hyperpush.task.problem import L2, Cost, Penalty
from hyperpush.task.starts import PerClient
from hyperpush.task.task import Task

NOT_KNOWN = 2**31  # more validation examples than any client has


class _Asked(eqx.Module):
    """Outer cost of a client in each run: the weight of its F, and the number of a validation example (−1: none)."""

    whole: Float[Array, "*clients k"]
    number: Float[Array, "*clients k"]


Hyper = tuple[Weights, PyTree, _Asked]


class _Apart(eqx.Module):
    """Sum over runs of the client's outer cost in the run (see `_Asked`): its F, one validation loss, or 0."""

    function: Cost
    singles: bool = eqx.field(static=True)

    def __call__(self, params: PyTree, hyper: Hyper, batch: Batch) -> Float[Array, ""]:
        own, asked = hyper[0].own, jax.lax.stop_gradient(hyper[2])
        given = batch if isinstance(self.function, BatchCost) else batch.examples
        losses = over_runs(lambda x: self.function(x, own, given), params)
        means = losses if losses.ndim == 1 else jax.vmap(batch.mean)(losses)
        total = jnp.sum(asked.whole * means)
        if not self.singles:
            return total
        place = jnp.maximum(asked.number, 0).astype(jnp.int32)
        chosen = jnp.take_along_axis(losses, place[:, None], axis=1)[:, 0]
        return total + jnp.sum(jnp.where(asked.number >= 0, chosen, 0))


class _Counted(eqx.Module):
    """Sum of an outer penalty over the runs whose outer cost includes this client's F."""

    function: Penalty

    def __call__(self, params: PyTree, hyper: Hyper) -> Float[Array, ""]:
        whole = jax.lax.stop_gradient(hyper[2].whole)
        return jnp.sum(whole * over_runs(lambda x: self.function(x, hyper[0].own), params))


def damped_task(made: Task, damping: float) -> Task:
    """Return the task `made` with damping in its mean Hessian, but not in its gradient at the task's params."""
    pull = jax.tree.map(lambda x: -damping * x, made.params)
    start = (made.hypers, pull)
    return made.replace(
        inner=of_part(made.inner, take_weights),
        outer=of_part(made.outer, take_weights),
        penalty=Pulled(L2(damping, made.penalty)),
        outer_penalty=made.outer_penalty and Chosen(made.outer_penalty, take_weights),
        _hypers=start if made.owner is not None else PerClient(start),
        by_example=(*made.by_example, *(False for _ in jax.tree.leaves(pull))),
    )


def split_outer(task: Task, made: Task, damping: float, places: list[Place], sites: bool) -> Task:
    """Return the task `made`, which is `task` with weights, as several runs side by side at the same params.

    The first run has the outer cost of the task. Each validation example in `places` adds a run with its loss alone.
    With `sites`, each client adds a run with its F alone.
    """
    if places:
        check_single_losses(task, "outer")
    alone = task.owner is not None
    axis, asked = (0 if alone else 1), _asked(task, places, sites, made.hypers.client.dtype)
    runs, start = asked.whole.shape[-1], made.hypers
    examples, clients = (jnp.repeat(each[..., None], runs, axis=-1) for each in (start.examples, start.client))
    weights = Weights(examples, clients, start.own)
    params = repeat_params(made.params, runs, axis)
    pull = jax.tree.map(lambda x: -damping * x, params)
    hypers = (weights, pull, asked)
    return made.replace(
        inner=of_part(Summed(made.inner), take_weights),
        penalty=Pulled(L2(damping, made.penalty and Summed(made.penalty))),
        outer=BatchCost(_Apart(task.outer, bool(places))),
        outer_penalty=task.outer_penalty and _Counted(task.outer_penalty),
        by_example=(*made.by_example, *(False for _ in jax.tree.leaves((pull, asked)))),
        _params=params if alone else PerClient(params),
        _hypers=hypers if alone else PerClient(hypers),
    )


def _asked(task: Task, places: list[Place], sites: bool, dtype: Any) -> _Asked:
    owners = range(task.clients) if task.owner is None else [task.owner]
    columns = task.clients if sites else 0
    none, no_sites = [-1], [-1] * columns
    number = [[*none, *(each if client == owner else -1 for client, each in places), *no_sites] for owner in owners]
    whole = [[1.0, *(0.0 for _ in places), *(float(site == owner) for site in range(columns))] for owner in owners]
    found = _Asked(jnp.asarray(whole, dtype), jnp.asarray(number, dtype))
    return found if task.owner is None else jax.tree.map(lambda leaf: leaf[0], found)


def find_places(task: Task, validation: Any) -> list[Place]:
    """Return the requested validation examples as pairs (client, number).

    A client without a number stands for all its validation examples.
    """
    if isinstance(validation, str) or not isinstance(validation, Iterable) or _is_one_pair(validation):
        raise InvalidInput("validation", validation, "a list of pairs [(client, number of its validation example), …]")
    if task.owner is None:
        counts = example_counts(task.validation)
    else:  # the numbers of other parties' examples are unknown here; each party checks its own
        counts = np.where(np.arange(task.clients) == task.owner, int(count(task.validation)), NOT_KNOWN)
    found: list[Place] = []
    for each in validation:
        if isinstance(each, tuple | list):
            found.append(check_place("validation", each, task, counts))
        elif counts[client := task.client(each)] < NOT_KNOWN:
            found += [(client, number) for number in range(counts[client])]
        else:
            raise InvalidInput("validation", each, "pairs (client, number): a party does not know others' examples")
    if not found or len(set(found)) < len(found):
        raise InvalidInput("validation", validation, "one validation example or more, each once; or None")
    return found


def _is_one_pair(given: Any) -> bool:
    """Return True for a bare (client, number) in place of a list of pairs; a list [0, 1] names two clients."""
    flat = isinstance(given, tuple | list) and len(given) == 2 and isinstance(given[1], int | np.integer)
    return flat and (isinstance(given, tuple) or isinstance(given[0], str))
