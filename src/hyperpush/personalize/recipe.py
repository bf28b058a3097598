"""What is shared and what is personal in a classifier: the shared part is trained, the personal part is the hyper."""

import abc
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, PRNGKeyArray, PyTree

from hyperpush.arguments import check_key
from hyperpush.checks import check_nonnegative
from hyperpush.errors import InvalidInput
from hyperpush.method import Configured, Number, as_number
from hyperpush.personalize.model import Model as Model
from hyperpush.personalize.model import as_model, without_start
from hyperpush.problem import L2
from hyperpush.task import Task


class Outer(NamedTuple):
    """How the hypers of a method move: Adam's rate, and the rate of the penalty.

    The other two are those of weights of labels, where they are learnt beside something else.
    """

    rate: float
    l2: float
    label_rate: float | None = None
    label_l2: float | None = None


class Recipe(Configured):
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
    def penalty(self, params: PyTree, hyper: PyTree) -> Float[Array, ""]:
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

    def task(
        self,
        model: Any,
        *,
        train: PyTree,
        key: PRNGKeyArray | int,
        l2: Number = 0.0,
        classes: int | None = None,
        **more: Any,
    ) -> Task:
        """The task of this recipe with a model: cross-entropy at both levels, weighted by label at the inner one.

        Its params are what is shared and its hypers what is personal, all clients' alike. Equal tasks of equal models
        have equal costs: nothing is compiled twice.

        Args:
            model: A model of `hyperpush.studies.models`, or one's own: see `hp.personalize.fit`.
            train: Examples (inputs, labels) of the inner cost, in any form that `hp.Task` takes.
            key: An integer or a JAX key, which decides where params and hypers start.
            l2: Rate of the inner penalty ½·l2·‖params‖², 0 or more; 0 has none.
            classes: How many classes there are; None takes it from the model.
            more: Further arguments of `hp.Task`, such as `validation`, `outer_on`, `names`.

        Raises:
            InvalidInput: The model does not fit the recipe or the examples.
        """
        check_nonnegative("l2", l2)
        made = as_model(model, train, classes)
        reason = self.unfit(made)
        if reason is not None:
            raise InvalidInput("recipe", type(self).__name__, f"another recipe: {reason}")
        shared, own = jax.random.split(check_key(key))
        start = {"params": self.params(made, shared), "hypers": self.hyper(made, own)}
        parts = self, without_start(made)
        costs = {"inner": WeightedLosses(*parts), "outer": Losses(*parts)}
        penalties = {"penalty": L2(as_number(l2)), "outer_penalty": self.penalty}
        return Task(**{**costs, **penalties, **start, "train": train, **more})


class Even(Recipe):
    """Recipes in whose training all labels count alike, with the penalty ½·l2·‖hyper‖²."""

    l2: eqx.AbstractVar[Number]

    def label_weights(self, model: Model, hyper: PyTree) -> None:
        return None

    def penalty(self, params: PyTree, hyper: PyTree) -> Float[Array, ""]:
        return half_square(self.l2, hyper)


def half_square(rate: Number, tree: PyTree) -> Float[Array, ""]:
    """½·rate·‖tree‖²."""
    return 0.5 * rate * jnp.asarray(optax.tree.norm(tree, squared=True))


def scaled(scores: Float[Array, "n k"]) -> Float[Array, "n k"]:
    """K·softmax of every client's scores: weights that are 1 if nothing was learnt."""
    return scores.shape[1] * jax.nn.softmax(scores, axis=1)


def losses(log_chances: Float[Array, "b classes"], labels: Int[Array, " b"]) -> Float[Array, " b"]:
    """The cross-entropy of each example."""
    return -jnp.take_along_axis(log_chances, labels[:, None], axis=1)[:, 0]


class Losses(eqx.Module):
    """The cross-entropy of each example under a recipe's model."""

    recipe: Recipe
    model: Model

    def __call__(self, params: PyTree, hyper: PyTree, batch: PyTree) -> Float[Array, " b"]:
        inputs, labels = batch
        return losses(self.recipe.log_chances(self.model, params, hyper, inputs), labels)


class WeightedLosses(Losses):
    """The same, times the weight that the recipe gives to the example's label: what is trained."""

    def __call__(self, params: PyTree, hyper: PyTree, batch: PyTree) -> Float[Array, " b"]:
        values, weights = super().__call__(params, hyper, batch), self.recipe.label_weights(self.model, hyper)
        return values if weights is None else values * weights[batch[1]]
