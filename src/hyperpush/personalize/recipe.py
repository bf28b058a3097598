"""What is shared and what is personal in a classifier: the shared part is trained, the personal part is the hyper."""

import abc
from collections.abc import Callable
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray, PyTree

from hyperpush.checks import check_nonnegative
from hyperpush.checks.verbs import check_key
from hyperpush.errors import InvalidInput
from hyperpush.method import Configured, Number, as_number
from hyperpush.personalize.model import Model as Model
from hyperpush.personalize.model import as_model, without_start
from hyperpush.problem import L2
from hyperpush.task import Task


class Recipe(Configured):
    """A frozen module whose fields are its options: what is shared, what is personal, and how both predict.

    A new recipe is one file with a class that has an option `l2`, `hyper` and `log_probs`. What else there is
    has a default: params of one model, all labels alike in training, the penalty ½·l2·‖hyper‖².
    """

    rate: ClassVar[float] = 0.1  # Adam's for the hypers, unless `fit` is given another optimizer
    l2: eqx.AbstractVar[Number]  # rate of the outer penalty

    def __check_init__(self):
        check_nonnegative(f"{type(self).__name__}.l2", self.l2)

    @abc.abstractmethod
    def hyper(self, model: Model, key: PRNGKeyArray) -> PyTree:
        """What is personal, to start from."""

    @abc.abstractmethod
    def log_probs(self, model: Model, params: PyTree, hyper: PyTree, inputs: Array) -> Float[Array, "b classes"]:
        """The logarithm of every class's probability."""

    def params(self, model: Model, key: PRNGKeyArray) -> PyTree:
        """What is shared, to start from; all clients start from the same."""
        return model.init(key)

    def label_weights(self, model: Model, hyper: PyTree) -> Float[Array, " classes"] | None:
        """How much an example of each label counts in training; None: all alike."""
        return None

    def penalty(self, params: PyTree, hyper: PyTree) -> Float[Array, ""]:
        """What is added to the outer cost to keep the hyper small."""
        return L2(self.l2)(hyper, None)

    @property
    def is_ensemble(self) -> bool:
        """Whether several models are trained, which are on axis 0 of the params."""
        return False

    def weights(self, hypers: PyTree) -> dict[str, Float[Array, "n k"]]:
        """What the hypers of all clients mean: weights of "models" or of "labels"."""
        return {}

    def with_own(self, hypers: PyTree, train_alone: Callable[[], PyTree]) -> PyTree:
        """The hypers to start from; `train_alone()` gives every client's params of a model that it trained alone."""
        return hypers

    def continue_from(self, model: Model, params: PyTree, hypers: PyTree) -> tuple[PyTree, PyTree]:
        """Params and hypers that continue from params that were trained with nothing personal."""
        return params, hypers

    def why_unfit(self, model: Model) -> str | None:
        """Why it cannot work with a model; None if it can."""
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
        reason = self.why_unfit(made)
        if reason is not None:
            raise InvalidInput("recipe", type(self).__name__, f"another recipe: {reason}")
        shared, own = jax.random.split(check_key(key))
        start = {"params": self.params(made, shared), "hypers": self.hyper(made, own)}
        parts = self, without_start(made)
        costs = {"inner": WeightedLosses(*parts), "outer": Losses(*parts)}
        penalties = {"penalty": L2(as_number(l2)), "outer_penalty": self.penalty}
        return Task(**{**costs, **penalties, **start, "train": train, **more})


def relative_weights(scores: Float[Array, "n k"]) -> Float[Array, "n k"]:
    """K·softmax of every client's scores: weights that are 1 if nothing was learned."""
    return scores.shape[1] * jax.nn.softmax(scores, axis=1)


def losses(log_probs: Float[Array, "b classes"], labels: Int[Array, " b"]) -> Float[Array, " b"]:
    """The cross-entropy of each example."""
    return -jnp.take_along_axis(log_probs, labels[:, None], axis=1)[:, 0]


class Losses(eqx.Module):
    """The cross-entropy of each example under a recipe's model."""

    recipe: Recipe
    model: Model

    def __call__(self, params: PyTree, hyper: PyTree, batch: PyTree) -> Float[Array, " b"]:
        inputs, labels = batch
        return losses(self.recipe.log_probs(self.model, params, hyper, inputs), labels)


class WeightedLosses(Losses):
    """The same, times the weight that the recipe gives to the example's label: what is trained."""

    def __call__(self, params: PyTree, hyper: PyTree, batch: PyTree) -> Float[Array, " b"]:
        values, weights = super().__call__(params, hyper, batch), self.recipe.label_weights(self.model, hyper)
        return values if weights is None else values * weights[batch[1]]
