"""Accuracies of personal models."""

from math import ceil
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from hyperpush.base import processes
from hyperpush.base.errors import InvalidInput
from hyperpush.data.batches import count, full_batch
from hyperpush.personalize.recipe import Model, ModelLosses, as_product
from hyperpush.task.problem import Problem
from hyperpush.task.task import Task


class Scores(NamedTuple):
    """Accuracies of personal models on the clients' own examples: by client, on average, and at the 10 % quantile."""

    each: Float[np.ndarray, " clients"]
    average: float  # weighted by the clients' numbers of examples
    p10: float  # accuracy of the ⌈n/10⌉-th worst client


class Accuracy(ModelLosses):
    """Metric that is 1 where the most probable class is right and 0 elsewhere; its mean is the accuracy."""

    def __call__(self, params: PyTree, hyper: PyTree, batch: PyTree) -> Float[Array, " b"]:
        inputs, labels = batch
        right = jnp.argmax(self.product.log_probs(self.model, params, hyper, inputs), axis=1) == labels
        return right.astype(jnp.zeros(()).dtype)


def accuracy(task: Task) -> Accuracy:
    """Return the accuracy of a recipe's task as a metric, for `metrics=` and `hp.EarlyStopping`.

    Args:
        task: A task that a recipe made, such as `hp.personalize.PL().task(…)`.

    Returns:
        A metric f(params, hyper, batch) that is 1 for every example whose most probable class is right, else 0.

    Raises:
        InvalidInput: The task was not made by a recipe.

    Example:
        >>> import jax.numpy as jnp
        >>> import hyperpush as hp
        >>> model = (lambda key: jnp.eye(2), lambda params, inputs: inputs @ params)
        >>> train = (jnp.eye(2)[None], jnp.array([[0, 0]]))  # one client, two examples, both of class 0
        >>> task = hp.personalize.Shared().task(model, train=train, outer_on="train", key=0)
        >>> hp.personalize.accuracy(task)(jnp.eye(2), {"shared": 0.0}, (jnp.eye(2), jnp.array([0, 0])))
        Array([1., 0.], dtype=float32)
    """
    if not isinstance(task.inner, ModelLosses):
        raise InvalidInput("task", "a task with other costs", "a task of a recipe: hp.personalize.PL().task(…)")
    return Accuracy(task.inner.product, task.inner.model)


def scores(recipes: Any, model: Model, params: PyTree, hypers: PyTree, data: PyTree, batch: int = 1) -> Scores:
    """Return the accuracies of personal models on their clients' examples.

    `hp.personalize.fit(…).scores("test")` calls this function with the fitted models.

    Args:
        recipes: Recipes that combine params and hypers into a classifier: one, a list, or a `Product`.
        model: The classifier.
        params: The shared part, clients on axis 0.
        hypers: The personal part, clients on axis 0.
        data: Examples (inputs, labels) with clients on axis 0, ragged or not.
        batch: Number of clients that are computed at a time, at least 1. A larger number is faster and takes more
            memory.

    Returns:
        `Scores`: each client's accuracy, the average weighted by numbers of examples, and the 10 % quantile.

    Raises:
        InvalidInput: A client lacks examples.
    """
    metric = Accuracy(as_product(recipes), model)
    problem = Problem(metric, metric)

    def measure(params: PyTree, hypers: PyTree, data: PyTree) -> tuple[Array, Array]:
        def one(own):
            params, hyper, data = own
            return problem.measure(metric, params, hyper, full_batch(data)), jnp.asarray(count(data))

        return jax.lax.map(one, (params, hypers, data), batch_size=batch)

    each, sizes = processes.by_client(measure, params, hypers, data)
    return summary(np.asarray(each, np.float64), np.asarray(sizes))


def summary(each: Float[np.ndarray, " clients"], sizes: np.ndarray) -> Scores:
    """Return the scores of these accuracies: with the average weighted by size, and the ⌈n/10⌉-th lowest of n."""
    if not len(each) or np.any(sizes < 1):
        raise InvalidInput("test", sizes.tolist(), "at least 1 example per client")
    return Scores(each, float(np.average(each, weights=sizes)), float(np.sort(each)[ceil(len(each) / 10) - 1]))
