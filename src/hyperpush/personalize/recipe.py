"""What is personal in a classifier: recipes, and products of them. The rest is shared, and trained."""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, ClassVar, Literal, get_args

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray, PyTree

from hyperpush.base import processes
from hyperpush.base.annotations import check_option
from hyperpush.base.checks import check_nonnegative
from hyperpush.base.errors import InvalidInput
from hyperpush.base.numbers import Number, as_number
from hyperpush.base.options import Configured
from hyperpush.base.ranges import NonNegative
from hyperpush.methods.optimizers import ByName, Optimizer, optimizer
from hyperpush.personalize.model import Model as Model
from hyperpush.personalize.model import as_model, check_labels, draw_several, first_examples, without_start
from hyperpush.task.problem import L2
from hyperpush.task.task import Task
from hyperpush.verbs.checks import check_key

Predict = Callable[[PyTree, Array], Float[Array, "b classes"]]  # (params, inputs) -> logits, up to a constant per input
# What a recipe changes. In a product, earlier stages are wrapped by later ones: docs/guides/personalize.md.
Stage = Literal["logits", "models", "prediction", "params"]


class Recipe(Configured):
    """A personal part: a frozen module whose fields are its options. `Product` combines any of them.

    A new recipe is one file with a class that has some of the methods below: where its hyper starts, and what it
    changes. What it leaves out changes nothing. Its hyper is the entry `name` of the task's hypers.

    Args:
        l2: Rate of the outer penalty ½·l2·‖hyper‖², 0 or more. 0 has none; larger values keep clients alike.
        outer: What moves its hyper, `hp.optimizer(…)`.
    """

    stage: ClassVar[Stage] = "logits"
    l2: NonNegative = eqx.field(converter=as_number, default=1e-3, kw_only=True)
    outer: Optimizer = eqx.field(default=optimizer("adam", learning_rate=0.1), kw_only=True)

    def __check_init__(self):
        check_option(f"{type(self).__name__}.stage", Stage, self.stage)

    @property
    def name(self) -> str:
        """Its entry in the hypers: the name of the class in small letters."""
        return type(self).__name__.lower()

    def hyper(self, model: Model, params: PyTree, key: PRNGKeyArray) -> PyTree:
        """What is personal, to start from; `params` are what is shared, to start from."""
        return jnp.zeros(())

    def split(self, model: Model, params: PyTree) -> tuple[PyTree, PyTree]:
        """The params that stay shared, and those that are the hyper; None: the hyper is no part of the params."""
        return params, None

    def count_models(self) -> int | None:
        """How many models are trained, which are on axis 0 of the params; None: one, without such an axis."""
        return None

    def wrap(self, predict: Predict, model: Model, hyper: PyTree) -> Predict:
        """How it changes predictions: a function of (params, inputs) that calls `predict`."""
        return predict

    def loss_weights(self, model: Model, hyper: PyTree, batch: PyTree) -> Float[Array, " b"] | float:
        """How much each example (inputs, labels) of a batch counts in training."""
        return 1.0

    def inner_penalty(self, params: PyTree, hyper: PyTree) -> Float[Array, ""] | float:
        """What is added to the inner cost."""
        return 0.0

    def outer_penalty(self, hyper: PyTree) -> Float[Array, ""]:
        """What is added to the outer cost to keep the hyper small."""
        return L2(self.l2)(hyper, None)

    def weights(self, hypers: PyTree) -> dict[str, Float[Array, "n k"]]:
        """What the hypers of all clients mean: weights of "models", "labels" or "examples"."""
        return {}

    def with_own(self, hypers: PyTree, train_alone: Callable[[], PyTree]) -> PyTree:
        """The hypers to start from; `train_alone()` gives every client's params of a model that it trained alone."""
        return hypers

    def why_unfit(self, model: Model) -> str | None:
        """Why it cannot work with a model; None if it can."""
        return None

    def task(self, model: Any, **options: Any) -> Task:
        """The task of this recipe alone: see `Product.task`."""
        return Product([self]).task(model, **options)


class Product(Configured):
    """Recipes that are used together: each has its own entry in the hypers, its own optimizer and its own penalty.

    With params x = (x_1 … x_K), client i predicts

        p = ρ_0 Σ_k π_k softmax(s ⊙ logits(w_k)) + ρ_1 softmax(logits(own model)),    w_k = x_k with i's own layer

    where s is of `PL`, π of `MTL`, ρ of `Interpolation` and the layer of `Head`; what is not used is 1, or K = 1. It
    trains on its mean of Π_r weight_r · loss, plus ½·l2·‖x‖² and the inner penalties of the recipes. The outer cost is
    the mean loss plus Σ_r ½·l2_r·‖λ_r‖².

    **Use it** where one personal part is not enough: `[MTL(), Clean()]`. **Avoid it** before each part was tried alone:
    every part adds hypers to fit.

    Args:
        recipes: At least one, no two of the same name. Their order matters among recipes of one `stage` only: those
            later in the list act on the result of those before.

    Raises:
        InvalidInput: Two claim the same name, or two train several models.

    Example:
        >>> import jax.numpy as jnp
        >>> import hyperpush as hp
        >>> model = (lambda key: jnp.eye(2), lambda params, inputs: inputs @ params)
        >>> train = (jnp.ones((3, 4, 2)), jnp.zeros((3, 4), int))  # three clients, four examples each
        >>> product = hp.personalize.Product([hp.personalize.MTL(models=5), hp.personalize.DA()])
        >>> task = product.task(model, train=train, outer_on="train", key=0)
        >>> {name: each.shape for name, each in task.hypers.items()}
        {'da': (3, 2), 'mtl': (3, 5)}
    """

    recipes: tuple[Recipe, ...] = eqx.field(
        converter=lambda given: tuple(sorted(given, key=lambda each: get_args(Stage).index(each.stage)))
    )

    @property
    def changes_predictions(self) -> bool:
        """Whether hypers enter predictions, and so the outer cost. If not, its direct gradient is a penalty's."""
        return any(type(each).wrap is not Recipe.wrap for each in self.recipes)

    def __check_init__(self):
        names = [each.name for each in self.recipes]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice or not names:
            raise InvalidInput(
                "recipes", self.title, f"one of each name; more claim {twice}" if twice else "at least one"
            )
        if sum(each.count_models() is not None for each in self.recipes) > 1:
            raise InvalidInput("recipes", self.title, "at most one that trains several models")

    @property
    def title(self) -> str:
        """Its recipes in words."""
        return " + ".join(type(each).__name__ for each in self.recipes)

    @property
    def outer(self) -> Optimizer:
        """What moves the hypers: each entry by its own optimizer."""
        return ByName.of({each.name: each.outer for each in self.recipes})

    def count_models(self) -> int | None:
        """How many models are trained; None: one, without an axis of models."""
        return next((count for each in self.recipes if (count := each.count_models()) is not None), None)

    def start(self, model: Model, key: PRNGKeyArray) -> tuple[PyTree, dict[str, PyTree]]:
        """What is shared and what is personal, to start from; all clients start from the same."""
        shared, own = jax.random.split(key)
        count = self.count_models()
        params = model.init(shared) if count is None else draw_several(model, shared, count)
        params, hypers = self.split(model, params)
        for each, drawn in zip(self.recipes, jax.random.split(own, len(self.recipes)), strict=True):
            if each.name not in hypers:
                hypers[each.name] = each.hyper(model, params, drawn)
        return params, hypers

    def split(self, model: Model, params: PyTree) -> tuple[PyTree, dict[str, PyTree]]:
        """What stays shared of params that were trained with nothing personal, and the hypers that were part of it."""
        hypers = {}
        for each in self.recipes:
            params, own = each.split(model, params)
            if own is not None:
                hypers[each.name] = own
        return params, hypers

    def with_own(self, hypers: dict[str, PyTree], train_alone: Callable[[], PyTree]) -> dict[str, PyTree]:
        """The hypers to start from, where some need a model that everybody trained alone."""
        return {each.name: each.with_own(hypers[each.name], train_alone) for each in self.recipes}

    def log_probs(
        self, model: Model, params: PyTree, hyper: dict[str, PyTree], inputs: Array
    ) -> Float[Array, "b classes"]:
        """The logarithm of every class's probability."""
        predict: Predict = model.apply
        for each in self.recipes:
            predict = each.wrap(predict, model, hyper[each.name])
        return jax.nn.log_softmax(predict(params, inputs))

    def loss_weights(self, model: Model, hyper: dict[str, PyTree], batch: PyTree) -> Any:
        """How much each example counts in training: the product of what the recipes say."""
        return prod(each.loss_weights(model, hyper[each.name], batch) for each in self.recipes)

    def inner_penalty(self, params: PyTree, hyper: dict[str, PyTree]) -> Any:
        """What the recipes add to the inner cost: a scalar."""
        return sum(each.inner_penalty(params, hyper[each.name]) for each in self.recipes)

    def outer_penalty(self, params: PyTree, hyper: dict[str, PyTree]) -> Any:
        """What the recipes add to the outer cost: a scalar."""
        return sum(each.outer_penalty(hyper[each.name]) for each in self.recipes)

    def weights(self, hypers: dict[str, PyTree]) -> dict[str, dict[str, Float[Array, "n k"]]]:
        """What the hypers of all clients mean, by recipe."""
        return {each.name: each.weights(hypers[each.name]) for each in self.recipes}

    def why_unfit(self, model: Model) -> str | None:
        """Why one of the recipes cannot work with a model; None if all can."""
        return next((reason for each in self.recipes if (reason := each.why_unfit(model))), None)

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
        """The task of the recipes with a model: cross-entropy at both levels, weighted by example at the inner one.

        Its params are what is shared, all clients' alike; its hypers are a dict with an entry for every recipe. Equal
        tasks of equal models have equal costs: nothing is compiled twice.

        Args:
            model: A model as `hp.personalize.fit` takes it.
            train: Examples (inputs, labels) of the inner cost, in any form that `hp.Task` takes.
            key: An integer or a JAX key, which decides where params and hypers start.
            l2: Rate of the inner penalty ½·l2·‖params‖², 0 or more; 0 has none.
            classes: How many classes there are; None takes it from the model.
            more: Further arguments of `hp.Task`, such as `validation`, `outer_on`, `names`.

        Raises:
            InvalidInput: The model does not fit the recipes or the examples, or a party has nothing to fit.
        """
        check_nonnegative("l2", l2)
        if processes.count() == 1:  # examples that are spread over processes cannot be looked at one by one
            check_labels(first_examples(train)[1], self.title)
        made = as_model(model, train, classes)
        reason = self.why_unfit(made)
        if reason is not None:
            raise InvalidInput("recipes", self.title, f"other recipes: {reason}")
        _check_fitted(more)
        params, hypers = self.start(made, check_key(key))
        parts = self, without_start(made)
        costs = {"inner": WeightedLosses(*parts), "outer": Losses(*parts)}
        penalties = {"penalty": L2(as_number(l2), self.inner_penalty), "outer_penalty": self.outer_penalty}
        return Task(**{**costs, **penalties, "params": params, "hypers": hypers, "train": train, **more})


def as_product(given: Any) -> Product:
    """One recipe, or several, as a product."""
    if isinstance(given, Product):
        return given
    several = list(given) if isinstance(given, Sequence) and not isinstance(given, str) else [given]
    for each in several:
        if not isinstance(each, Recipe):
            allowed = "objects such as hp.personalize.PL(), or a baseline such as hp.personalize.FedProx(…)"
            raise InvalidInput("recipes", f"the class {each.__name__}" if isinstance(each, type) else each, allowed)
    return Product(several)


def _check_fitted(more: dict[str, Any]) -> None:
    """Refuse a party that has no examples to fit its hypers to."""
    on = more.get("outer_on") or "validation"
    given, names = more.get(on), more.get("names") or ()
    for client, own in enumerate(given if isinstance(given, list) else ()):
        leaves = jax.tree.leaves(own)
        if not leaves or not all(map(len, leaves)):
            name = names[client] if client < len(names) else client
            allowed = f"at least 1 example per client, as outer_on={on!r} fits them; or outer_on='train' and no {on}"
            raise InvalidInput(on, f"no examples of client {name!r}", allowed)


def relative_weights(scores: Float[Array, "*n k"]) -> Float[Array, "*n k"]:
    """K·softmax of scores: weights that are 1 if nothing was learned."""
    return scores.shape[-1] * jax.nn.softmax(scores, axis=-1)


def losses(log_probs: Float[Array, "b classes"], labels: Int[Array, " b"]) -> Float[Array, " b"]:
    """The cross-entropy of each example."""
    return -jnp.take_along_axis(log_probs, labels[:, None], axis=1)[:, 0]


class Losses(eqx.Module):
    """The cross-entropy of each example under a product's model."""

    product: Product
    model: Model

    def __call__(self, params: PyTree, hyper: dict[str, PyTree], batch: PyTree) -> Float[Array, " b"]:
        inputs, labels = batch
        return losses(self.product.log_probs(self.model, params, hyper, inputs), labels)


class WeightedLosses(Losses):
    """The same, times the weight that the recipes give to the example: what is trained."""

    def __call__(self, params: PyTree, hyper: dict[str, PyTree], batch: PyTree) -> Float[Array, " b"]:
        return super().__call__(params, hyper, batch) * self.product.loss_weights(self.model, hyper, batch)
