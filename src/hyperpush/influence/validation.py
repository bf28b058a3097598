"""Scores for single validation examples: one estimate with a right-hand side for each of them."""

from collections.abc import Iterable
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from hyperpush.base.errors import InvalidInput
from hyperpush.data.batches import Batch, BatchCost, count
from hyperpush.data.sets import example_counts
from hyperpush.influence.removal import Summed, over_runs, repeat_params
from hyperpush.influence.weights import Chosen, Place, Weights, check_place, check_single_losses, of_part
from hyperpush.task.problem import Cost, Penalty
from hyperpush.task.starts import PerClient
from hyperpush.task.task import Task

NOT_KNOWN = 2**31  # more validation examples than anybody has


class _Apart(eqx.Module):
    """F of the first run, and of every other run the loss of one validation example, where it is this client's."""

    function: Cost

    def __call__(self, params: PyTree, hyper: tuple[Weights, Float[Array, " k"]], batch: Batch) -> Float[Array, ""]:
        weights, number = hyper
        losses = over_runs(lambda x: self.function(x, weights.own, batch.examples), params)
        place = jnp.maximum(number, 0).astype(jnp.int32)
        chosen = jnp.take_along_axis(losses[1:], place[:, None], axis=1)[:, 0]
        return batch.mean(losses[0]) + jnp.sum(jnp.where(number >= 0, chosen, 0))


class _First(eqx.Module):
    """An outer penalty of the first run alone: it is no example's."""

    function: Penalty

    def __call__(self, params: PyTree, hyper: tuple[Weights, Float[Array, " k"]]) -> Float[Array, ""]:
        return over_runs(lambda x: self.function(x, hyper[0].own), params)[0]


def take_weights(hyper: tuple[Weights, Any]) -> Weights:
    """The weights, of hypers with something beside."""
    return hyper[0]


def split_validation(task: Task, made: Task, places: list[Place]) -> Task:
    """The task `made`, that is `task` with weights, in as many runs side by side as there are places, and one more.

    All are at the same params. Run 0 has the outer cost of the task, run r the loss of validation example r−1 alone.
    """
    check_single_losses(task, "outer")
    runs, alone = 1 + len(places), task.owner is not None
    axis = 0 if alone else 1
    start: Weights = made.hypers
    examples, clients = (jnp.repeat(each[..., None], runs, axis=-1) for each in (start.examples, start.client))
    owners = [task.owner] if alone else range(task.clients)
    numbers = [[number if client == owner else -1 for client, number in places] for owner in owners]
    hypers = (Weights(examples, clients, start.own), jnp.asarray(numbers[0] if alone else numbers, start.client.dtype))
    params = repeat_params(made.params, runs, axis)
    return made.replace(
        inner=of_part(Summed(made.inner), take_weights),
        penalty=made.penalty and Chosen(Summed(made.penalty), take_weights),
        outer=BatchCost(_Apart(task.outer)),
        outer_penalty=task.outer_penalty and _First(task.outer_penalty),
        by_example=(*made.by_example, False),
        _params=params if alone else PerClient(params),
        _hypers=hypers if alone else PerClient(hypers),
    )


def find_places(task: Task, validation: Any) -> list[Place]:
    """The validation examples that are meant: pairs (client, number), and all of a client that is named alone."""
    if isinstance(validation, str) or not isinstance(validation, Iterable) or _is_one_pair(validation):
        raise InvalidInput("validation", validation, "a list of pairs [(client, number of its validation example), …]")
    if task.owner is None:
        counts = example_counts(task.validation)
    else:  # nobody knows how many others have; they check themselves
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
    """Whether (client, number) was given in place of a list of pairs; a list [0, 1] names two clients."""
    flat = isinstance(given, tuple | list) and len(given) == 2 and isinstance(given[1], int | np.integer)
    return flat and (isinstance(given, tuple) or isinstance(given[0], str))
