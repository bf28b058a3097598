"""How good personal models are."""

from math import ceil
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from hyperpush import processes
from hyperpush.data.batches import count, everything
from hyperpush.errors import InvalidInput
from hyperpush.personalize.recipe import Losses, Model, Recipe
from hyperpush.problem import Problem
from hyperpush.task import Task


class Scores(NamedTuple):
    """Accuracy on the clients' own examples."""

    each: Float[np.ndarray, " clients"]
    average: float  # clients count by their number of examples
    p10: float  # of the client that one in ten is not better than


class Accuracy(Losses):
    """Whether each example's most probable class is the right one: a metric whose mean is the accuracy."""

    def __call__(self, params: PyTree, hyper: PyTree, batch: PyTree) -> Float[Array, " b"]:
        inputs, labels = batch
        right = jnp.argmax(self.recipe.log_probs(self.model, params, hyper, inputs), axis=1) == labels
        return right.astype(jnp.zeros(()).dtype)


def accuracy(task: Task) -> Accuracy:
    """The metric of a recipe's task, for `metrics=` and `hp.EarlyStopping`."""
    if not isinstance(task.inner, Losses):
        raise InvalidInput("task", "a task of other costs", "one that a recipe made: hp.personalize.PL().task(…)")
    return Accuracy(task.inner.recipe, task.inner.model)


def scores(recipe: Recipe, model: Model, params: PyTree, hypers: PyTree, data: PyTree, batch: int = 1) -> Scores:
    """Of personal models (clients on axis 0) on examples of their own; `batch` clients are computed at a time."""

    metric = Accuracy(recipe, model)
    problem = Problem(metric, metric)

    def measure(params: PyTree, hypers: PyTree, data: PyTree) -> tuple[Array, Array]:
        def one(own):
            params, hyper, data = own
            return problem.measure(metric, params, hyper, everything(data)), jnp.asarray(count(data))

        return jax.lax.map(one, (params, hypers, data), batch_size=batch)

    each, sizes = processes.by_client(measure, params, hypers, data)
    return summary(np.asarray(each, np.float64), np.asarray(sizes))


def summary(each: Float[np.ndarray, " clients"], sizes: np.ndarray) -> Scores:
    """The average by size, and the ⌈n/10⌉-th lowest of n."""
    if not len(each) or np.any(sizes < 1):
        raise InvalidInput("test", sizes.tolist(), "at least 1 example per client")
    return Scores(each, float(np.average(each, weights=sizes)), float(np.sort(each)[ceil(len(each) / 10) - 1]))
