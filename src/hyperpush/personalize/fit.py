"""Fit a personal model for every client, from a classifier of the user, in one call."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray, PyTree

from hyperpush.algorithms.base import Algorithm
from hyperpush.algorithms.pdbo import PDBO
from hyperpush.algorithms.stopping import EarlyStopping
from hyperpush.algorithms.ties import Ties
from hyperpush.base import processes
from hyperpush.base.checks import check_integer
from hyperpush.base.errors import InvalidInput, unknown
from hyperpush.data.batches import Numbered, Ragged
from hyperpush.engines.base import Engine
from hyperpush.engines.simulate import Simulate
from hyperpush.hypergradients.base import HypergradientEstimator
from hyperpush.hypergradients.direct_gradient import DirectGradient
from hyperpush.hypergradients.hgp import HGP
from hyperpush.inner.base import InnerSolver
from hyperpush.inner.local_sgd import LocalSGD
from hyperpush.inner.sgp import SGP
from hyperpush.methods.optimizers import Optimizer
from hyperpush.methods.registry import construct
from hyperpush.networks import Network
from hyperpush.personalize.model import Model, attempt, check_labels
from hyperpush.personalize.recipe import ModelLosses, Product, Recipe, as_product
from hyperpush.personalize.recipes import Shared
from hyperpush.personalize.scores import Scores, accuracy, scores
from hyperpush.task.task import Task
from hyperpush.verbs.recording import Metrics
from hyperpush.verbs.results import Result, Solution, Training, own
from hyperpush.verbs.solve import solve
from hyperpush.verbs.train import train as train_params

INNER = SGP(200, 0.1)
# A short series stays bounded where a model's Hessian is indefinite, for step sizes below 1 / λ_max.
HYPERGRADIENT = HGP(10, 10, 0.1, keep_mass=True)
STEPS = 8  # default number of steps of the hypers


@dataclass(frozen=True)
class PersonalModel:
    """One client's personal model, which predicts the classes of inputs.

    Attributes:
        name: The client's name.
        params: The shared part, as this client holds it.
        hyper: The personal part, with one entry per recipe.
        recipes: Recipes that combine both parts into predictions.
        model: The classifier.
    """

    name: str
    params: PyTree
    hyper: dict[str, PyTree]
    recipes: Product
    model: Model

    def log_probabilities(self, inputs: Any) -> Float[Array, "b classes"]:
        """Return the logarithm of each class's probability, for each input.

        Raises:
            InvalidInput: The inputs differ in shape from those in training, or are not on axis 0.
        """
        array = jnp.asarray(inputs)

        def compute() -> Array:
            return self.recipes.log_probs(self.model, self.params, self.hyper, array)

        return attempt(compute, "inputs", f"an array {array.shape}", "inputs on axis 0, each as in training")

    def predict(self, inputs: Any) -> Int[Array, " b"]:
        """Return the most probable class of each input."""
        return jnp.argmax(self.log_probabilities(inputs), axis=1)


class _Personal(Result):
    """Methods that all results of a recipe's task share."""

    def client(self, name: str | int) -> Any:
        """Return one client's `PersonalModel`, by name or number."""
        return PersonalModel(*own(self.task, name, self.task.params, self.task.hypers), *_parts(self.task))

    def scores(self, on: str = "test") -> Scores:
        """Return the accuracy of each client's model on its own examples of a data set."""
        if on not in self.task.data.sets:
            raise unknown("on", on, self.task.data.sets)
        return scores(*_parts(self.task), self.task.params, self.task.hypers, self.task.data.sets[on])


@dataclass(frozen=True, repr=False)
class PersonalTraining(_Personal, Training):
    """A `Training` of a recipe's task; `.client(name)` is a client's model, `.scores("test")` has all accuracies."""


@dataclass(frozen=True, repr=False)
class PersonalSolution(_Personal, Solution):
    """A `Solution` of a recipe's task; `.client(name)` is a client's model, `.scores("test")` has all accuracies."""


def fit(
    model: Any,
    recipes: Recipe | Sequence[Recipe] | Product | InnerSolver,
    network: Network,
    *,
    train: PyTree,
    key: PRNGKeyArray | int,
    validation: PyTree = None,
    test: PyTree = None,
    holdout: PyTree = None,
    outer_on: str | None = None,
    method: InnerSolver | Algorithm | None = None,
    inner: InnerSolver | None = None,
    hypergradient: HypergradientEstimator | None = None,
    outer: Optimizer | Any = None,
    steps: int | None = None,
    ties: Ties | None = None,
    l2: float = 1e-3,
    classes: int | None = None,
    names: Sequence[str] | None = None,
    private: Mapping[str, Any] | None = None,
    metrics: Metrics | None = None,
    every: int | None = None,
    engine: Engine = Simulate(),
) -> PersonalSolution | PersonalTraining:
    """Fit a personal model for every client, from a classifier of the user.

    Recipes split the model into a shared part and personal parts; several recipes can be combined (`Product`). The
    shared part is trained on `train`. `PDBO` moves the personal parts to lower the mean cost on `validation`. A
    baseline is trained on `train` alone.

    Args:
        model: An Equinox module that takes one input and returns its logits; a function key -> such a module; an object
            with `init(key)` and `apply(params, inputs)`, such as a Flax module; or a pair of these two functions, which
            take many inputs. Training of an Equinox module starts from the numbers that it holds. Several models
            (`MTL`) start from these numbers, shuffled within each array; pass a function for other starts.
        recipes: The personal parts: `hp.personalize.PL()`, or several such as `[MTL(models=5), Clean()]`. Or a
            baseline, an inner solver such as `hp.personalize.FedProx(…)`.
        network: The network, with one node per client.
        train: Examples (inputs, labels), in any form that `hp.Task` takes; labels are 0, …, classes − 1.
        key: An integer or a JAX key. It determines starts, random links and mini-batches.
        validation: Examples for fitting the personal parts. Baselines do not need them.
        test: Examples for `scores("test")`; no choice is made on them.
        holdout: Examples for choosing the best step by mean accuracy; None takes the last step.
        outer_on: Data set for fitting the personal parts; None is `"validation"`. With `"train"`, as in the papers,
            `validation` takes the place of `holdout`.
        method: Another algorithm or inner solver for the recipes' task. None takes `PDBO` with the options `inner`,
            `hypergradient`, `outer`, `steps` and `ties`, which no other method accepts.
        inner: Solver of the shared part, before the first and after each step of the personal parts. None:
            `hp.SGP(200, 0.1)`.
        hypergradient: The hypergradient estimator. None: `hp.HGP(10, 10, 0.1, keep_mass=True)`, a short series.
        outer: Optimizer of all personal parts. None: the `outer` of each recipe.
        steps: Steps of the personal parts, 0 or more. None: 8.
        ties: `hp.algorithms.Ties(graph, strength, entries=("mtl",))` keeps hypers of neighbors on a graph alike. None:
            no ties.
        l2: Rate of the inner penalty ½·l2·‖params‖², 0 or more. Estimators converge faster with larger rates.
        classes: Number of classes; None takes it from the model's output.
        names: The clients' names; None names them by their numbers.
        private: Options of `hp.Task.private`, such as `{"clip": 1.0, "noise": hp.privacy.Gaussian(20.0), …}`; None
            adds no noise. The choice of the best step is then noisy and counted, too. For the noise of a given ε use
            `Product.task`, `hp.within_budget` and `hp.solve`.
        metrics: Metrics for the history, as in `hp.solve`.
        every: Steps between two rows of the history, as in `hp.solve`.
        engine: Engine that runs the clients.

    Returns:
        A `Solution`, or a `Training` of a baseline. `.client(name)` is a client's `PersonalModel`, with
        `.predict(inputs)`; `.scores("test")` has all clients' accuracies.

    Raises:
        InvalidInput: The arguments do not fit together; the message names the field and the allowed values.

    Example:
        >>> import equinox as eqx, jax, jax.numpy as jnp
        >>> import hyperpush as hp
        >>> inputs = jax.random.normal(jax.random.key(0), (4, 40, 2))
        >>> labels = (inputs[..., 0] > jnp.array([[-0.5], [-0.5], [0.5], [0.5]])).astype(int)
        >>> model = eqx.nn.MLP(2, 2, width_size=8, depth=1, key=jax.random.key(1))
        >>> fitted = hp.personalize.fit(model, hp.personalize.PL(), hp.networks.Ring(4), key=0,
        ...                             train=(inputs[:, :20], labels[:, :20]),
        ...                             validation=(inputs[:, 20:], labels[:, 20:]))
        >>> fitted.client("3").predict(jnp.array([[2.0, 0.0], [-2.0, 0.0]]))
        Array([1, 0], dtype=int32)
    """
    product, method = _choose(recipes, method)
    if method is not None:
        unused = {"inner": inner, "hypergradient": hypergradient, "outer": outer, "steps": steps, "ties": ties}
        _refuse_unused(method, unused)
        if outer_on is None and validation is None:
            outer_on = "train"  # a baseline fits the shared part alone
    sets: dict[str, Any] = {"train": train, "validation": validation, "holdout": holdout, "test": test}
    posed: dict[str, Any] = {**sets, "outer_on": outer_on, "key": key, "l2": l2, "classes": classes, "names": names}
    task = product.task(model, **posed)
    _check_labels(task)
    if private is not None:
        task = _private_task(task, private)
    options: dict[str, Any] = {"key": key, "metrics": metrics, "every": every, "engine": engine}
    if isinstance(method, InnerSolver):
        return _as(PersonalTraining, train_params(task, method, network, **options))

    def train_alone() -> PyTree:
        if private is not None:
            allowed = "recipes in which clients do not first train a model alone: that training adds no noise"
            raise InvalidInput("recipes", f"{product.title} with private=", allowed)
        alone = _train_alone(INNER if inner is None else inner)
        return train_params(Shared().task(model, **posed), alone, network, key=key, engine=engine).params

    if method is None:
        count = STEPS if steps is None else check_integer("steps", steps, minimum=0)
        method = PDBO(
            inner=INNER if inner is None else inner,
            hypergradient=HYPERGRADIENT if hypergradient is None else hypergradient,
            outer=product.outer if outer is None else outer,
            steps=count,
            restart=False,
            stop=_stop(task, count),
            ties=ties,
        )
    if not product.changes_predictions and any(isinstance(part, DirectGradient) for part in method.parts()):
        allowed = f"another estimator: {product.title} changes no prediction, so only the penalty has a direct gradient"
        raise InvalidInput("hypergradient", "DirectGradient", allowed)
    task = task._moved(hypers=product.with_own(task.hypers, train_alone))
    return _as(PersonalSolution, solve(task, method, network, **options))


def _choose(recipes: Any, method: Any) -> tuple[Product, InnerSolver | Algorithm | None]:
    """Return the recipes and the method for their task; None means PDBO."""
    if isinstance(recipes, InnerSolver):
        if method is not None:
            raise InvalidInput("method", type(method).__name__, f"None: {type(recipes).__name__} is the method")
        recipes, method = getattr(recipes, "recipe", Shared()), recipes
    product = as_product(recipes)
    if method is not None and not isinstance(method, InnerSolver | Algorithm):
        raise InvalidInput("method", method, "an algorithm such as hp.PDBO(…), an inner solver, or None")
    if method is None and all(isinstance(each, Shared) for each in product.recipes):
        given = "Shared(), which has no personal part"
        raise InvalidInput("recipes", given, "another recipe, or method=hp.SGP(…), method=hp.LocalSGD(…)")
    return product, method


def _refuse_unused(method: InnerSolver | Algorithm, given: dict[str, Any]) -> None:
    """Raise `InvalidInput` for options of the default method if another method is used."""
    for option, value in given.items():
        if value is not None:
            name, options = type(method).__name__, ", ".join(method.options())
            raise InvalidInput(option, value, f"None: {name} does the fitting, with its own options ({options})")


def _private_task(task: Task, options: object) -> Task:
    if not isinstance(options, Mapping):
        raise InvalidInput("private", options, "a dict of options of task.private, such as clip and noise; or None")
    return construct(task.private, dict(options), "task.private")


def _stop(task: Task, steps: int) -> EarlyStopping | None:
    """Return the rule that chooses the best step on examples that no part is fitted to; None without such examples."""
    on = next((name for name in ("holdout", "validation") if name in task.data.sets and name != task.outer_on), None)
    bounds = None if task.privacy is None else (0.0, 1.0)
    weighted = task.privacy is None  # private means give all clients the same weight
    return None if on is None else EarlyStopping(accuracy(task), on, steps + 1, "max", weighted=weighted, bounds=bounds)


def _train_alone(inner: InnerSolver) -> LocalSGD:
    """Return a solver by which each client trains alone, with the steps, step size and optimizer of `inner`."""
    shared = ("steps", "step_size", "batch_size", "optimizer")
    return LocalSGD(**{name: value for name, value in inner.options().items() if name in shared})


def _check_labels(task: Task) -> None:
    """Raise `InvalidInput` for labels of any data set that are outside of the model's classes."""
    product, model = _parts(task)
    for name, given in task.data.sets.items():
        for kind in (Ragged, Numbered):
            given = given.examples if isinstance(given, kind) else given
        labels = processes.visible(given[1])
        check_labels(labels, product.title, name)
        if np.min(labels) < 0 or np.max(labels) >= model.classes:
            given = f"labels from {np.min(labels)} to {np.max(labels)}"
            raise InvalidInput(
                f"{name}, labels", given, f"0 to {model.classes - 1}: the model has {model.classes} logits"
            )


def _parts(task: Task) -> tuple[Product, Model]:
    assert isinstance(task.inner, ModelLosses)
    return task.inner.product, task.inner.model


def _as(kind: type, found: Result) -> Any:
    return kind(**{each.name: getattr(found, each.name) for each in fields(found)})
