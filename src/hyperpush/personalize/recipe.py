"""What is shared and what is personal in a classifier: the shared part is trained, the personal part is the hyper."""

import abc
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple, Protocol, runtime_checkable

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, PRNGKeyArray, PyTree

from hyperpush import processes
from hyperpush.checks import not_negative
from hyperpush.data.batches import Batch
from hyperpush.problem import Problem


@runtime_checkable
class Model(Protocol):
    """A classifier as pure functions (see `hyperpush.models`)."""

    classes: int

    def init(self, key: PRNGKeyArray, /) -> PyTree:
        """Params to start from."""
        ...

    def apply(self, params: PyTree, inputs: Array, /) -> Float[Array, "b classes"]:
        """The logits of each input."""
        ...


class Outer(NamedTuple):
    """How the hypers of a method move: Adam's rate, and the rate of the penalty.

    The other two are those of weights of labels, where they are learnt beside something else.
    """

    rate: float
    l2: float
    label_rate: float | None = None
    label_l2: float | None = None


class Recipe(eqx.Module):
    """A frozen module whose fields are its options; a new recipe is one file with the first five of these methods.

    A dict `METHODS` in the file makes methods of it: by name, the recipe for an `Outer`, and the one to take if nothing
    else is asked for.
    """

    @abc.abstractmethod
    def params(self, model: Model, key: PRNGKeyArray) -> PyTree:
        """What is shared, to start from; all clients start from the same."""

    @abc.abstractmethod
    def hyper(self, model: Model, key: PRNGKeyArray) -> PyTree:
        """What is personal, to start from."""

    @abc.abstractmethod
    def log_chances(self, model: Model, params: PyTree, hyper: PyTree, inputs: Array) -> Float[Array, "b classes"]:
        """The logarithm of every class's probability."""

    @abc.abstractmethod
    def label_weights(self, model: Model, hyper: PyTree) -> Float[Array, " classes"] | None:
        """How much an example of each label counts in training; None: all alike."""

    @abc.abstractmethod
    def penalty(self, hyper: PyTree) -> Float[Array, ""]:
        """What is added to the outer cost to keep the hyper small."""

    @property
    def several(self) -> bool:
        """Whether several models are trained, which are on axis 0 of the params."""
        return False

    def shown(self, hypers: PyTree) -> dict[str, Float[Array, "n k"]]:
        """What the hypers of all clients mean: weights of "models" or of "labels"."""
        return {}

    def with_own(self, hypers: PyTree, alone: Callable[[], PyTree]) -> PyTree:
        """The hypers to start from; `alone()` gives every client's params of a model that it has trained alone."""
        return hypers

    def continued(self, model: Model, params: PyTree, hypers: PyTree) -> tuple[PyTree, PyTree]:
        """Params and hypers that go on from params that were trained with nothing personal."""
        return params, hypers

    def unfit(self, model: Model) -> str | None:
        """Why it cannot do with a model; None if it can."""
        return None

    def problem(self, model: Model, l2: float = 0.0) -> Problem:
        """The mean cross-entropy f, weighted by label, + ½·l2·‖params‖², and F, not weighted, + the penalty.

        Examples are (inputs, labels), with or without padding. The same object each time: nothing is compiled twice.
        """
        return _problem(self, model, not_negative("l2", l2))


class Even(Recipe):
    """Recipes in whose training all labels count alike, with the penalty ½·l2·‖hyper‖²."""

    l2: eqx.AbstractVar[float]

    def label_weights(self, model: Model, hyper: PyTree) -> None:
        return None

    def penalty(self, hyper: PyTree) -> Float[Array, ""]:
        return half_square(self.l2, hyper)


def half_square(rate: float, tree: PyTree) -> Float[Array, ""]:
    """½·rate·‖tree‖²."""
    return 0.5 * rate * jnp.asarray(optax.tree.norm(tree, squared=True))


def distance(rate: float, tree: PyTree, other: PyTree) -> Float[Array, ""]:
    """½·rate·‖tree − other‖²."""
    return half_square(rate, jax.tree.map(jnp.subtract, tree, other))


def scaled(scores: Float[Array, "n k"]) -> Float[Array, "n k"]:
    """K·softmax of every client's scores: weights that are 1 if nothing was learnt."""
    return scores.shape[1] * jax.nn.softmax(scores, axis=1)


def examples_of(batch: PyTree) -> tuple[Array, ...]:
    """The arrays of a batch (inputs, labels, …), padding included."""
    return batch.examples if isinstance(batch, Batch) else batch


def mean(batch: PyTree, values: Float[Array, " b"]) -> Float[Array, ""]:
    """The mean of one value per example over the real ones."""
    return batch.mean(values) if isinstance(batch, Batch) else jnp.mean(values)


def losses(log_chances: Float[Array, "b classes"], labels: Int[Array, " b"]) -> Float[Array, " b"]:
    """The cross-entropy of each example."""
    return -jnp.take_along_axis(log_chances, labels[:, None], axis=1)[:, 0]


def stacked(recipe: Recipe, model: Model, clients: int, key: PRNGKeyArray) -> tuple[PyTree, PyTree]:
    """Params and hypers to start from, the same for all clients, who are on axis 0."""
    shared, own = jax.random.split(key)
    start = recipe.params(model, shared), recipe.hyper(model, own)
    if processes.count() > 1 and clients % jax.device_count() == 0:
        return processes.stack(lambda client: start, clients)
    return jax.tree.map(lambda leaf: jnp.repeat(leaf[None], clients, axis=0), start)


@lru_cache(maxsize=64)
def _problem(recipe: Recipe, model: Model, l2: float) -> Problem:
    def each(params: PyTree, hyper: PyTree, batch: PyTree) -> Float[Array, " b"]:
        inputs, labels = examples_of(batch)
        return losses(recipe.log_chances(model, params, hyper, inputs), labels)

    def inner(params: PyTree, hyper: PyTree, batch: PyTree) -> Float[Array, ""]:
        values, weights = each(params, hyper, batch), recipe.label_weights(model, hyper)
        if weights is not None:
            values = values * weights[examples_of(batch)[1]]
        return mean(batch, values) + half_square(l2, params)

    def outer(params: PyTree, hyper: PyTree, batch: PyTree) -> Float[Array, ""]:
        return mean(batch, each(params, hyper, batch)) + recipe.penalty(hyper)

    return Problem(inner, outer)
