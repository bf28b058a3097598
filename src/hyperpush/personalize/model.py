"""The protocol of a classifier as pure functions, and adapters for users' models."""

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol, TypeVar, runtime_checkable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from hyperpush.base import processes
from hyperpush.base.errors import InvalidInput
from hyperpush.data.batches import open_batch
from hyperpush.data.sets import DataSet

T = TypeVar("T")
KINDS = (
    "an Equinox module that takes one input, a function key -> such a module, an object with init(key) and "
    "apply(params, inputs), or a pair of these two functions"
)

REGRESSION = "recipes are for classifiers, and hp.Task takes the costs of a regression"


@runtime_checkable
class Model(Protocol):
    """A classifier as pure functions: one draws its starting params, the other returns logits."""

    classes: int

    def init(self, key: PRNGKeyArray, /) -> PyTree:
        """Return the starting params."""
        ...

    def apply(self, params: PyTree, inputs: Array, /) -> Float[Array, "b classes"]:
        """Return the logits of each input."""
        ...


class OwnModel(eqx.Module):
    """A user's model as a classifier; made by `as_model`."""

    function: Callable[[PyTree, Array], Array]  # params and inputs to logits
    classes: int = eqx.field(static=True)
    start: Callable[[PRNGKeyArray], PyTree] | None = eqx.field(static=True)
    # Different params for each key, for recipes that train several models, where `start` ignores the key.
    fresh: Callable[[PRNGKeyArray], PyTree] | None = eqx.field(static=True, default=None)

    def init(self, key: PRNGKeyArray) -> PyTree:
        """Return the starting params."""
        assert self.start is not None
        return self.start(key)

    def apply(self, params: PyTree, inputs: Array) -> Any:
        """Return the logits of each input; a user's function may return any shape."""
        return self.function(params, inputs)


class _ByInput(eqx.Module):
    """An Equinox module whose float arrays are passed as params, applied to several inputs at once."""

    rest: PyTree

    def __call__(self, params: PyTree, inputs: Array) -> Array:
        return jax.vmap(eqx.combine(params, self.rest))(inputs)


def draw_several(model: Model, key: PRNGKeyArray, count: int) -> PyTree:
    """Draw different starting params for several models, on axis 0."""
    draw = model.fresh if isinstance(model, OwnModel) and model.fresh is not None else model.init
    return jax.vmap(draw)(jax.random.split(key, count))


def without_start(model: Model) -> Model:
    """Return the model for use in costs, without its starting functions, which may hold large arrays."""
    return replace(model, start=None, fresh=None) if isinstance(model, OwnModel) else model


def as_model(given: Any, train: PyTree, classes: int | None = None) -> Model:
    """Return a user's model in the form of `Model`, as pure functions.

    Training of an Equinox module starts from the numbers that it holds. Several models of a recipe start from these
    numbers, shuffled within each array. With a function key -> module, each model starts from new draws.

    Args:
        given: A `Model`, an Equinox module that takes one input, a function key -> such a module, an object with
            `init(key)` and `apply(params, inputs)` such as a Flax module, or a pair of these two functions. An `init`
            with a second argument gets one client's inputs.
        train: Training examples (inputs, labels) of a task; one client's inputs are used.
        classes: Number of classes; None takes it from the model's output.

    Raises:
        InvalidInput: The model has none of these forms, or its output is not one row of logits per input.
    """
    if isinstance(given, type):
        raise InvalidInput("model", f"the class {given.__name__}", f"an object: {KINDS}")
    if isinstance(given, Model) and isinstance(given.classes, int):
        # Examples that are spread over processes cannot be read one by one.
        found = _count_classes(given, first_examples(train)[0]) if processes.count() == 1 else given.classes
        if found != given.classes:
            raise InvalidInput("model", f"{found} logits per input", f"{given.classes}, the classes that it names")
    else:
        inputs = first_examples(train)[0]
        given = _adapt(given, inputs)
        found = _count_classes(given, inputs)
        given = replace(given, classes=found)
    if found < 2:
        raise InvalidInput("model", "one output per input", f"a logit for each of at least 2 classes; {REGRESSION}")
    if classes is not None and classes != found:
        raise InvalidInput("classes", classes, f"{found}, as many logits as the model has; or None")
    return given


def _adapt(given: Any, inputs: Array) -> OwnModel:
    """Return a user's model as pure functions, with 0 for the number of classes, which is found later."""
    if isinstance(given, tuple) and len(given) == 2 and all(map(callable, given)):
        return _of_functions(*given, inputs)
    init, apply = getattr(given, "init", None), getattr(given, "apply", None)
    if callable(init) and callable(apply):
        return _of_functions(init, apply, inputs)
    if isinstance(given, eqx.Module) and callable(given):
        numbers, rest = eqx.partition(given, eqx.is_inexact_array)
        return OwnModel(_ByInput(rest), 0, lambda key: numbers, lambda key: _shuffle(numbers, key))
    if callable(given):
        return _of_constructor(given)
    raise InvalidInput("model", f"a {type(given).__name__}", KINDS)


def _of_functions(init: Callable[..., Any], apply: Callable[..., Any], inputs: Array) -> OwnModel:
    return OwnModel(apply, 0, (lambda key: init(key, inputs)) if _takes_inputs(init) else init)


def _of_constructor(make: Callable[[PRNGKeyArray], Any]) -> OwnModel:
    shape = _try_model(lambda: eqx.filter_eval_shape(make, jax.random.key(0)))
    if not isinstance(shape, eqx.Module) or not callable(shape):
        raise InvalidInput("model", f"a function that returns a {type(shape).__name__}", KINDS)
    rest = eqx.filter(shape, lambda leaf: not isinstance(leaf, jax.ShapeDtypeStruct))
    return OwnModel(_ByInput(rest), 0, lambda key: eqx.filter(make(key), eqx.is_inexact_array))


def _takes_inputs(init: Callable[..., Any]) -> bool:
    """Return True if `init` needs inputs beside the key, as in Flax and Haiku."""
    try:
        parameters = inspect.signature(init).parameters.values()
    except (TypeError, ValueError):
        return False
    needed = [each for each in parameters if each.default is each.empty and each.kind is not each.VAR_KEYWORD]
    return len(needed) > 1


def _shuffle(numbers: PyTree, key: PRNGKeyArray) -> PyTree:
    """Shuffle the numbers within each array; if they were drawn independently, this is an equally good start."""
    leaves, structure = jax.tree.flatten(numbers)
    keys = jax.random.split(key, len(leaves))
    mixed = [
        jax.random.permutation(own, leaf.ravel()).reshape(leaf.shape) for own, leaf in zip(keys, leaves, strict=True)
    ]
    return structure.unflatten(mixed)


def first_examples(train: PyTree) -> tuple[Array, Array]:
    """Return one client's inputs and labels."""
    examples, _, _ = open_batch(DataSet("train", train).of(0))
    examples = getattr(examples, "examples", examples)  # clients own different numbers of examples
    if not isinstance(examples, tuple | list) or len(examples) != 2:
        raise InvalidInput("train", f"a {type(examples).__name__}", "a pair (inputs, labels)")
    return jnp.asarray(examples[0]), jnp.asarray(examples[1])


def check_labels(labels: Any, recipes: str, field: str = "train") -> None:
    """Raise InvalidInput unless labels are whole numbers."""
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        given = f"numbers of type {labels.dtype}, for {recipes}"
        raise InvalidInput(f"{field}, labels", given, f"whole numbers that count classes from 0; {REGRESSION}")


def _count_classes(model: Model, inputs: Array) -> int:
    """Return the number of classes: the length of a row of the model's logits."""
    params = _try_model(lambda: jax.eval_shape(model.init, jax.random.key(0)))
    logits = _try_model(lambda: jax.eval_shape(model.apply, params, inputs))
    shape = getattr(logits, "shape", None)
    if shape is None or len(shape) != 2 or shape[0] != len(inputs) or not jnp.issubdtype(logits.dtype, jnp.floating):
        said = f"a model that returns {logits} for {len(inputs)} inputs"
        raise InvalidInput("model", said, "one row of logits per input, (inputs, classes)")
    return shape[1]


def _try_model(compute: Callable[[], T]) -> T:
    return attempt(compute, "model", "a model", f"{KINDS}, for the inputs in train")


def attempt(compute: Callable[[], T], field: str, given: str, allowed: str) -> T:
    """Return the result of a user's function; convert any error in it to `InvalidInput` with a message of one line."""
    try:
        return compute()
    except InvalidInput:
        raise
    except Exception as error:  # the model is the user's: say what it raised
        said = f"{given} that fails with {type(error).__name__}: {error}".splitlines()[0]
        raise InvalidInput(field, said, allowed) from error
