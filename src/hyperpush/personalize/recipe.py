"""Recipes that define the personal parts of a classifier, and products of recipes; all other params are shared."""

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
# The part of a classifier that a recipe changes. In a product, later stages wrap earlier ones (guides/personalize.md).
Stage = Literal["logits", "models", "prediction", "params"]


class Recipe(Configured):
    """Base class of recipes, which each define one personal part of a classifier; fields are the recipe's options.

    `Product` combines recipes. A new recipe is one file with a class that overrides some of the methods below. They
    return the starting hyper, and change predictions or costs. Methods that are not overridden change nothing. The
    recipe's hyper is the entry `name` of the task's hypers.

    Args:
        l2: Rate of the outer penalty ½·l2·‖hyper‖², 0 or more. 0: no penalty; larger values keep clients alike.
        outer: Optimizer of the recipe's hyper, `hp.optimizer(…)`.
    """

    stage: ClassVar[Stage] = "logits"
    l2: NonNegative = eqx.field(converter=as_number, default=1e-3, kw_only=True)
    outer: Optimizer = eqx.field(default=optimizer("adam", learning_rate=0.1), kw_only=True)

    def __check_init__(self):
        check_option(f"{type(self).__name__}.stage", Stage, self.stage)

    @property
    def name(self) -> str:
        """Entry of this recipe in the hypers: the class name in lower case."""
        return type(self).__name__.lower()

    def hyper(self, model: Model, params: PyTree, key: PRNGKeyArray) -> PyTree:
        """Return one client's starting hyper; `params` are the starting params."""
        return jnp.zeros(())

    def split(self, model: Model, params: PyTree) -> tuple[PyTree, PyTree]:
        """Return the params that stay shared, and the params that become the hyper, or None if all stay shared."""
        return params, None

    def count_models(self) -> int | None:
        """Return the number of models on axis 0 of the params; None: one model, without such an axis."""
        return None

    def wrap(self, predict: Predict, model: Model, hyper: PyTree) -> Predict:
        """Return the changed prediction: a function of (params, inputs) that calls `predict`."""
        return predict

    def loss_weights(self, model: Model, hyper: PyTree, batch: PyTree) -> Float[Array, " b"] | float:
        """Return the weight in training of each example (inputs, labels) of a batch."""
        return 1.0

    def inner_penalty(self, params: PyTree, hyper: PyTree) -> Float[Array, ""] | float:
        """Return the recipe's term of the inner cost."""
        return 0.0

    def outer_penalty(self, hyper: PyTree) -> Float[Array, ""]:
        """Return the recipe's term of the outer cost, which keeps the hyper small."""
        return L2(self.l2)(hyper, None)

    def weights(self, hypers: PyTree) -> dict[str, Float[Array, "n k"]]:
        """Return the weights that all clients' hypers encode, under the name "models", "labels" or "examples"."""
        return {}

    def with_own(self, hypers: PyTree, train_alone: Callable[[], PyTree]) -> PyTree:
        """Return the starting hypers; `train_alone()` returns params of models that each client trained alone."""
        return hypers

    def why_unfit(self, model: Model) -> str | None:
        """Return the reason why this recipe does not fit a model; None if it fits."""
        return None

    def task(self, model: Any, **options: Any) -> Task:
        """Return the task of this recipe alone: see `Product.task`."""
        return Product([self]).task(model, **options)


class Product(Configured):
    """Several recipes that are used together, each with its own entry in the hypers, optimizer and penalty.

    With params x = (x_1 … x_K) of K models, client i predicts the probabilities

        p = ρ_0 Σ_k π_k softmax(s ⊙ logits(w_k)) + ρ_1 softmax(logits(own model)),    w_k = x_k with i's own layer

    The scales s belong to `PL`, the weights π to `MTL`, the weights ρ to `Interpolation`, and the layer to `Head`.
    Without `MTL`, K = 1; factors of unused recipes are 1, and without `Interpolation` the last term is absent. The
    client's inner cost is its mean of Π_r weight_r · loss, plus ½·l2·‖x‖² and the inner penalties of the recipes r. Its
    outer cost is the mean loss plus Σ_r ½·l2_r·‖λ_r‖².

    **Use it** if one personal part is not enough: `[MTL(), Clean()]`. **Avoid it** before each part was tried alone,
    because each part adds hypers to fit.

    Args:
        recipes: At least one, with different names. Order matters only among recipes of one `stage`: later ones act on
            the result of earlier ones.

    Raises:
        InvalidInput: Two recipes have the same name, or two train several models.

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
        """True if hypers enter predictions and so the outer cost. If not, only the penalty has a direct gradient."""
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
        """Names of the recipes, joined by +."""
        return " + ".join(type(each).__name__ for each in self.recipes)

    @property
    def outer(self) -> Optimizer:
        """Optimizer of the hypers, which applies each recipe's optimizer to the entry of this recipe."""
        return ByName.of({each.name: each.outer for each in self.recipes})

    def count_models(self) -> int | None:
        """Return the number of models on axis 0 of the params; None: one model, without such an axis."""
        return next((count for each in self.recipes if (count := each.count_models()) is not None), None)

    def start(self, model: Model, key: PRNGKeyArray) -> tuple[PyTree, dict[str, PyTree]]:
        """Return the starting params and hypers, equal for all clients."""
        shared, own = jax.random.split(key)
        count = self.count_models()
        params = model.init(shared) if count is None else draw_several(model, shared, count)
        params, hypers = self.split(model, params)
        for each, drawn in zip(self.recipes, jax.random.split(own, len(self.recipes)), strict=True):
            if each.name not in hypers:
                hypers[each.name] = each.hyper(model, params, drawn)
        return params, hypers

    def split(self, model: Model, params: PyTree) -> tuple[PyTree, dict[str, PyTree]]:
        """Split params that were trained without personal parts into shared params and hypers."""
        hypers = {}
        for each in self.recipes:
            params, own = each.split(model, params)
            if own is not None:
                hypers[each.name] = own
        return params, hypers

    def with_own(self, hypers: dict[str, PyTree], train_alone: Callable[[], PyTree]) -> dict[str, PyTree]:
        """Return the starting hypers; `train_alone()` returns params of models that each client trained alone."""
        return {each.name: each.with_own(hypers[each.name], train_alone) for each in self.recipes}

    def log_probs(
        self, model: Model, params: PyTree, hyper: dict[str, PyTree], inputs: Array
    ) -> Float[Array, "b classes"]:
        """Return the logarithm of each class's probability."""
        predict: Predict = model.apply
        for each in self.recipes:
            predict = each.wrap(predict, model, hyper[each.name])
        return jax.nn.log_softmax(predict(params, inputs))

    def loss_weights(self, model: Model, hyper: dict[str, PyTree], batch: PyTree) -> Any:
        """Return the weight of each example in training: the product of the recipes' weights."""
        return prod(each.loss_weights(model, hyper[each.name], batch) for each in self.recipes)

    def inner_penalty(self, params: PyTree, hyper: dict[str, PyTree]) -> Any:
        """Return the sum of the recipes' terms of the inner cost."""
        return sum(each.inner_penalty(params, hyper[each.name]) for each in self.recipes)

    def outer_penalty(self, params: PyTree, hyper: dict[str, PyTree]) -> Any:
        """Return the sum of the recipes' terms of the outer cost."""
        return sum(each.outer_penalty(hyper[each.name]) for each in self.recipes)

    def weights(self, hypers: dict[str, PyTree]) -> dict[str, dict[str, Float[Array, "n k"]]]:
        """Return the weights that all clients' hypers encode, by recipe."""
        return {each.name: each.weights(hypers[each.name]) for each in self.recipes}

    def why_unfit(self, model: Model) -> str | None:
        """Return the reason why a recipe does not fit a model; None if all fit."""
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
        """Return the task of fitting the recipes with a model, with cross-entropy as the inner and the outer cost.

        Recipes may weight the examples of the inner cost. The task's params are the shared part, which starts equal at
        all clients. Its hypers are a dict with an entry per recipe. Equal models give equal costs, so nothing is
        compiled twice.

        Args:
            model: A model as `hp.personalize.fit` takes it.
            train: Examples (inputs, labels) of the inner cost, in any form that `hp.Task` takes.
            key: An integer or a JAX key, which decides the starting params and hypers.
            l2: Rate of the inner penalty ½·l2·‖params‖², 0 or more; 0: no penalty.
            classes: Number of classes; None takes it from the model.
            more: Further arguments of `hp.Task`, such as `validation`, `outer_on`, `names`.

        Raises:
            InvalidInput: The model does not fit the recipes or the examples, or a party lacks examples to fit its
                hypers.
        """
        check_nonnegative("l2", l2)
        if processes.count() == 1:  # examples spread over processes cannot be read one by one
            check_labels(first_examples(train)[1], self.title)
        made = as_model(model, train, classes)
        reason = self.why_unfit(made)
        if reason is not None:
            raise InvalidInput("recipes", self.title, f"other recipes: {reason}")
        _check_fitted(more)
        params, hypers = self.start(made, check_key(key))
        parts = self, without_start(made)
        costs = {"inner": WeightedLosses(*parts), "outer": ModelLosses(*parts)}
        penalties = {"penalty": L2(as_number(l2), self.inner_penalty), "outer_penalty": self.outer_penalty}
        return Task(**{**costs, **penalties, "params": params, "hypers": hypers, "train": train, **more})


def as_product(given: Any) -> Product:
    """Return one recipe, a list of recipes or a product as a product."""
    if isinstance(given, Product):
        return given
    several = list(given) if isinstance(given, Sequence) and not isinstance(given, str) else [given]
    for each in several:
        if not isinstance(each, Recipe):
            allowed = "objects such as hp.personalize.PL(), or a baseline such as hp.personalize.FedProx(…)"
            raise InvalidInput("recipes", f"the class {each.__name__}" if isinstance(each, type) else each, allowed)
    return Product(several)


def _check_fitted(more: dict[str, Any]) -> None:
    """Raise `InvalidInput` if a party lacks examples for fitting its hypers."""
    on = more.get("outer_on") or "validation"
    given, names = more.get(on), more.get("names") or ()
    for client, own in enumerate(given if isinstance(given, list) else ()):
        leaves = jax.tree.leaves(own)
        if not leaves or not all(map(len, leaves)):
            name = names[client] if client < len(names) else client
            allowed = f"at least 1 example per client, as outer_on={on!r} fits them; or outer_on='train' and no {on}"
            raise InvalidInput(on, f"no examples of client {name!r}", allowed)


def relative_weights(scores: Float[Array, "*n k"]) -> Float[Array, "*n k"]:
    """Return K·softmax(scores): weights that are 1 for equal scores."""
    return scores.shape[-1] * jax.nn.softmax(scores, axis=-1)


def losses(log_probs: Float[Array, "b classes"], labels: Int[Array, " b"]) -> Float[Array, " b"]:
    """Return the cross-entropy of each example."""
    return -jnp.take_along_axis(log_probs, labels[:, None], axis=1)[:, 0]


class ModelLosses(eqx.Module):
    """The outer cost of a product's task: the cross-entropy of each example."""

    product: Product
    model: Model

    def __call__(self, params: PyTree, hyper: dict[str, PyTree], batch: PyTree) -> Float[Array, " b"]:
        inputs, labels = batch
        return losses(self.product.log_probs(self.model, params, hyper, inputs), labels)


class WeightedLosses(ModelLosses):
    """The inner cost of a product's task: the cross-entropy of each example times its weight from the recipes."""

    def __call__(self, params: PyTree, hyper: dict[str, PyTree], batch: PyTree) -> Float[Array, " b"]:
        return super().__call__(params, hyper, batch) * self.product.loss_weights(self.model, hyper, batch)
