"""A task in which every training example and every client has a weight: its hypergradient is influence."""

from collections.abc import Iterable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PyTree

from hyperpush.cost_checks import check_cost
from hyperpush.data.batches import Ragged
from hyperpush.data.sets import rows
from hyperpush.errors import InvalidInput
from hyperpush.problem import Cost, Penalty
from hyperpush.starts import PerClient
from hyperpush.task import Task, one_client

Place = tuple[int, int]  # (client, its example)


class Weights(eqx.Module):
    """How much each of a client's examples counts, and how much the client; 1 is as given, 0 is removed.

    `own` are the client's hypers, which stay as they are.
    """

    examples: Float[Array, "..."]  # [clients, m]; several runs at once are on the last axis
    client: Float[Array, "..."]
    own: PyTree


class _Inner(eqx.Module):
    cost: Cost

    def __call__(self, params: PyTree, hyper: Weights, batch: PyTree) -> Float[Array, " b"]:
        return hyper.client * hyper.examples * self.cost(params, hyper.own, batch)


class _Outer(eqx.Module):
    cost: Cost

    def __call__(self, params: PyTree, hyper: Weights, batch: PyTree) -> Float[Array, "..."]:
        return self.cost(params, hyper.own, batch)


class _Penalty(eqx.Module):
    penalty: Penalty
    by_client: bool = eqx.field(static=True)

    def __call__(self, params: PyTree, hyper: Weights) -> Float[Array, ""]:
        value = self.penalty(params, hyper.own)
        return hyper.client * value if self.by_client else value


def weighted(task: Task) -> Task:
    """f_i(x, (w, c)) = c ((1/N_i) Σ_j w_j ℓ(x; z_ij) + penalty), with all weights 1; F_i as it is.

    N_i stays as it is when weights change. Equation 12 of Terashita and Hara (arXiv:2210.02129), with a weight for each
    client besides. The inner cost has to return one loss per example: no share of the penalty belongs to one.
    """
    if task.privacy is not None:
        raise InvalidInput("task", "a private task", "one without noise: influence is what single examples do")
    check_single_losses(task)
    m, dtype = rows(task.train, one=task.owner is not None), jnp.zeros(()).dtype
    clients = () if task.owner is not None else (task.clients,)
    start = Weights(jnp.ones((*clients, m), dtype), jnp.ones(clients, dtype), task.hypers)
    return task.replace(
        inner=_Inner(task.inner),
        outer=_Outer(task.outer),
        penalty=None if task.penalty is None else _Penalty(task.penalty, True),
        outer_penalty=None if task.outer_penalty is None else _Penalty(task.outer_penalty, False),
        _hypers=start if task.owner is not None else PerClient(start),
        by_example=(True, False, *task.by_example),
    )


def check_single_losses(task: Task) -> None:
    """Refuse a task whose inner cost is a scalar: it does not say what each example adds to it."""
    task.check()
    one = task.owner is not None
    shapes: Any = (lambda tree: jax.eval_shape(lambda: tree)) if one else one_client
    params, hypers, train = shapes(task.params), shapes(task.hypers), shapes(task.train)
    if check_cost("task.inner", task.problem, task.inner, params, hypers, train).scalar:
        given = "a cost that returns one scalar"
        raise InvalidInput("task.inner", given, "one loss per example, with what belongs to none in penalty=")


def example_counts(task: Task) -> Int[np.ndarray, " n"]:
    """How many training examples each client owns."""
    if isinstance(task.train, Ragged):
        return np.asarray(task.train.counts)
    return np.full(task.clients, rows(task.train, one=False))


def without(task: Task, places: Iterable[Place] = (), clients: Iterable[int] = ()) -> Weights:
    """The weights with these examples, given as (client, number), and these clients removed."""
    n, counts = task.clients, example_counts(task)
    examples, client = np.ones((n, rows(task.train, one=False))), np.ones(n)
    for each in clients:
        client[task.client(each)] = 0
    for place in places:
        if (
            not isinstance(place, tuple | list)
            or len(place) != 2
            or not all(isinstance(i, int | np.integer) for i in place)
        ):
            raise InvalidInput("places", place, "pairs (client, number of its example)")
        owner, number = place
        if not (0 <= owner < n and 0 <= number < counts[owner]):
            owned = counts[owner] if 0 <= owner < n else "its"
            raise InvalidInput("places", (owner, number), f"clients from 0 to {n - 1}, with {owned} examples from 0")
        examples[owner, number] = 0
    dtype = jnp.zeros(()).dtype
    return Weights(jnp.asarray(examples, dtype), jnp.asarray(client, dtype), task.hypers)


def check_weights(task: Task, weights: Sequence[Weights]) -> None:
    """Refuse weights that were made for another task."""
    shape = (task.clients, rows(task.train, one=False))
    for each in weights:
        if not isinstance(each, Weights) or each.examples.shape != shape:
            given = each.examples.shape if isinstance(each, Weights) else type(each).__name__
            raise InvalidInput("weights", given, f"hp.influence.without(task, …) of this task: {shape}")
