"""Make tasks in which every training example and client has a weight; the hypergradient by weights is influence."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PyTree

from hyperpush.base.checks import no_type_check
from hyperpush.base.errors import InvalidInput
from hyperpush.data.batches import BatchCost
from hyperpush.data.sets import example_counts, rows
from hyperpush.task.cost_checks import check_cost
from hyperpush.task.problem import Cost, JointCost, Penalty
from hyperpush.task.starts import PerClient
from hyperpush.task.task import Task, client_shapes
from hyperpush.verbs.checks import check_task

Place = tuple[int, int]  # (client, its example)


class Weights(eqx.Module):
    """Weights of a client's examples, and of the client itself: 1 keeps an example or client, 0 removes it.

    `own` holds the client's hypers, which stay fixed.

    Args:
        examples: One number for each training example, [clients, examples].
        client: One number for each client.
        own: The clients' hypers.

    Example:
        >>> import hyperpush as hp
        >>> task = hp.tasks.logistic(clients=3, seed=0)
        >>> hp.influence.without(task, clients=[1]).client.tolist()
        [1.0, 0.0, 1.0]
    """

    examples: Float[Array, "..."]  # [clients, m]; several runs at once are on the last axis
    client: Float[Array, "..."]
    own: PyTree


class Chosen(eqx.Module):
    """A cost or penalty that sees only the part of the hyper that `choose` selects."""

    function: Cost | Penalty
    choose: Callable[[PyTree], PyTree] = eqx.field(static=True)

    def __call__(self, params: PyTree, hyper: PyTree, *batch: PyTree) -> Float[Array, "..."]:
        return self.function(params, self.choose(hyper), *batch)


def of_part(cost: Cost, choose: Callable[[PyTree], PyTree]) -> Cost:
    """Return the cost of the part of the hyper that `choose` selects; a `BatchCost` stays a `BatchCost`."""
    return BatchCost(Chosen(cost.function, choose)) if isinstance(cost, BatchCost) else Chosen(cost, choose)


class _Weighted(eqx.Module):
    """A cost or penalty times the client's weight; losses are also multiplied by the weights of their examples."""

    function: Cost | Penalty

    def __call__(self, params: PyTree, hyper: Weights, *batch: PyTree) -> Float[Array, "..."]:
        value = hyper.client * self.function(params, hyper.own, *batch)
        return hyper.examples * value if batch else value


def get_own(weights: Weights) -> PyTree:
    """Return the client's own hypers, without the weights."""
    return weights.own


@no_type_check
def with_weights(task: Task) -> Task:
    """Return the task whose hypers are the weights of its training examples and clients.

    With a weight w_j for each of the client's N_i examples z_ij and a weight c for the client, the inner cost becomes

        f_i(x, (w, c)) = c ((1/N_i) Σ_j w_j ℓ(x; z_ij) + penalty)

    N_i does not change with the weights, and the outer cost F_i does not depend on them. This is equation 12 of
    Terashita and Hara (arXiv:2210.02129), with an additional weight for each client. The inner cost must return one
    loss per example, without the penalty, which belongs to no example.

    Args:
        task: A task that is not private, whose inner cost returns one loss per example.

    Returns:
        The task whose hypers are `Weights`, all 1.

    Raises:
        InvalidInput: The task is private, or its inner cost is one scalar.

    Example:
        >>> import hyperpush as hp
        >>> task = hp.tasks.logistic(clients=3, seed=0)
        >>> float(hp.influence.with_weights(task).hypers.examples.min())
        1.0
    """
    check_task(task)
    if task.privacy is not None:
        raise InvalidInput("task", "a private task", "one without noise: influence is what single examples do")
    check_single_losses(task)
    m, dtype = rows(task.train, one=task.owner is not None), jnp.zeros(()).dtype
    clients = () if task.owner is not None else (task.clients,)
    start = Weights(jnp.ones((*clients, m), dtype), jnp.ones(clients, dtype), task.hypers)
    return task.replace(
        inner=_Weighted(task.inner),
        outer=of_part(task.outer, get_own),
        penalty=task.penalty and _Weighted(task.penalty),
        outer_penalty=task.outer_penalty and Chosen(task.outer_penalty, get_own),
        _hypers=start if task.owner is not None else PerClient(start),
        by_example=(True, False, *task.by_example),
    )


def check_single_losses(task: Task, level: Literal["inner", "outer"] = "inner") -> None:
    """Raise `InvalidInput` if the cost of this level is a scalar, which hides the losses of single examples."""
    task.check()
    cost, examples, penalty = (
        (task.inner, task.train, "penalty") if level == "inner" else (task.outer, task.validation, "outer_penalty")
    )
    shapes = [client_shapes(task, tree) for tree in (task.params, task.hypers, examples)]
    if isinstance(cost, JointCost) or check_cost(f"task.{level}", task.problem, cost, *shapes).scalar:
        given = "a cost that returns one scalar"
        raise InvalidInput(f"task.{level}", given, f"one loss per example, with what belongs to none in {penalty}=")


@no_type_check
def without(task: Task, places: Iterable[tuple[int | str, int]] = (), clients: Iterable[int | str] = ()) -> Weights:
    """Return weights with some examples and clients removed, for `group_score` and `retrain`.

    Args:
        task: The task whose examples these are.
        places: Examples to remove, as pairs (client by number or name, number of its example).
        clients: Clients to remove, by number or name.

    Raises:
        InvalidInput: An example or client does not exist.

    Example:
        >>> import jax.numpy as jnp
        >>> import hyperpush as hp
        >>> data = jnp.ones((2, 3, 1)), jnp.ones((2, 3))
        >>> def loss(x, hyper, batch):
        ...     return (batch[0] @ x - batch[1]) ** 2
        >>> task = hp.Task(inner=loss, outer=loss, params=jnp.zeros(1), hypers=0.0, train=data, validation=data)
        >>> print(hp.influence.without(task, [(0, 2)]).examples)
        [[1. 1. 0.]
         [1. 1. 1.]]
    """
    check_task(task)
    if task.owner is not None:
        raise InvalidInput("task", "one party's task", "the task of all clients: groups are removed in a simulation")
    for name, given in (("places", places), ("clients", clients)):
        if isinstance(given, str) or not isinstance(given, Iterable):
            raise InvalidInput(f"without.{name}", given, f"a list of {name}")
    counts = example_counts(task.train)
    examples, client = np.ones((task.clients, rows(task.train, one=False))), np.ones(task.clients)
    for each in clients:
        client[task.client(each)] = 0
    for place in places:
        examples[check_place("places", place, task, counts)] = 0
    dtype = jnp.zeros(()).dtype
    return Weights(jnp.asarray(examples, dtype), jnp.asarray(client, dtype), task.hypers)


def check_place(field: str, place: Any, task: Task, counts: Int[np.ndarray, " n"]) -> Place:
    """Return a pair (number of a client, number of its example); raise `InvalidInput` for unknown ones."""
    if not isinstance(place, tuple | list) or len(place) != 2 or not isinstance(place[1], int | np.integer):
        raise InvalidInput(field, place, "pairs (client, number of its example)")
    owner, number = task.client(place[0]), int(place[1])
    if not 0 <= number < counts[owner]:
        raise InvalidInput(field, place, f"numbers from 0 to {counts[owner] - 1} for client {task.names[owner]!r}")
    return owner, number


def check_weights(task: Task, weights: Sequence[Weights]) -> None:
    """Raise `InvalidInput` for weights that were made for another task."""
    shape = (task.clients, rows(task.train, one=False))
    for each in weights:
        if not isinstance(each, Weights) or each.examples.shape != shape:
            given = each.examples.shape if isinstance(each, Weights) else type(each).__name__
            raise InvalidInput("weights", given, f"hp.influence.without(task, …) of this task: {shape}")
