"""Check one client's costs from shapes: find what costs depend on, and name those that do not fit the task."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jax.interpreters.partial_eval import dce_jaxpr
from jaxtyping import PyTree

from hyperpush.base.errors import InvalidInput
from hyperpush.data.batches import BatchCost, Data, Ragged, capacity, full_batch
from hyperpush.task.problem import Cost, JointCost, ModelLoss, Penalty, Problem

APART = 1e-3  # relative difference of losses above which it cannot be rounding in float32


class Uses(NamedTuple):
    """Dependence of a cost on params and hypers, and the form of its result."""

    params: bool
    leaves: tuple[bool, ...]  # for each leaf of the hypers, True if the cost depends on it
    scalar: bool  # True for one scalar, False for one loss per example

    @property
    def hyper(self) -> bool:
        return any(self.leaves)


def as_cost(field: str, given: Any) -> Any:
    """Return a task's cost; turn a pair of functions into a `ModelLoss`."""
    if isinstance(given, tuple):
        if len(given) != 2 or not all(map(callable, given)):
            raise InvalidInput(f"task.{field}", given, "a function, or a pair of functions (model, loss)")
        return ModelLoss(*given)
    if isinstance(given, JointCost):
        if field == "inner":
            raise InvalidInput("task.inner", type(given).__name__, "one client's cost: only outer can be a joint cost")
        return given
    return check_function(field, given, optional=False)


def check_function(field: str, given: Any, optional: bool = True) -> Any:
    """Return a task's cost or penalty unchanged; raise `InvalidInput` unless it is a function."""
    if (given is None and optional) or (callable(given) and not isinstance(given, type)):
        return given
    wanted = "(params, hyper)" if "penalty" in field else "(params, hyper, batch)"
    raise InvalidInput(f"task.{field}", given, f"a function of {wanted}")


def check_cost(
    field: str, problem: Problem, cost: Cost, params: PyTree, hyper: PyTree, examples: PyTree, metric: bool = False
) -> Uses:
    """Find from shapes what a cost depends on; raise `InvalidInput` if it fails or its result has a wrong form.

    A metric may also return whole numbers and truth values.
    """

    def value(params: PyTree, hyper: PyTree, data: PyTree) -> Any:
        return problem._losses(cost, params, hyper, full_batch(data))

    shape, (uses_params, uses_hyper) = _trace(field, value, (params, hyper, examples), "(params, hyper, batch)")
    leaves = jax.tree.leaves(shape)
    if isinstance(shape, tuple | list | dict) or len(leaves) != 1:
        kind = "(loss, aux)" if isinstance(shape, tuple) and len(shape) == 2 else f"a {type(shape).__name__}"
        raise InvalidInput(
            field, f"a cost that returns {kind}", "one loss per example, or one scalar, and nothing else"
        )
    found, size = leaves[0], capacity(examples)
    if not metric and not jnp.issubdtype(found.dtype, jnp.floating):
        raise InvalidInput(field, f"a cost that returns numbers of type {found.dtype}", "real floating-point numbers")
    if found.shape not in ((), (size,)):
        allowed = f"one loss per example, ({size},), or one scalar"
        raise InvalidInput(field, f"a cost that returns shape {found.shape} for {size} examples", allowed)
    if found.shape == () and isinstance(examples, Ragged) and not isinstance(cost, BatchCost):
        allowed = (
            "one loss per example, as clients own different numbers of them; or hp.Batch.cost(function), with a mask"
        )
        raise InvalidInput(field, "a cost that returns one scalar", allowed)
    return Uses(uses_params, uses_hyper, found.shape == ())


def check_rows(field: str, problem: Problem, cost: Cost, params: PyTree, hyper: PyTree, data: Ragged) -> None:
    """Raise `InvalidInput` if the loss of one example depends on other examples of its batch.

    Such a cost, for example one that uses the mean of a batch, would count padding as examples if clients own different
    numbers of them. The check compares the loss of the largest client's first example in two batches: with two other
    examples, and with copies of itself. It moves the params first, because many costs are flat at the start.
    """
    counts = np.asarray(data.counts)
    client = int(np.argmax(counts))
    if isinstance(cost, BatchCost | JointCost) or counts[client] < 2:
        return
    some = np.array([0, counts[client] // 2, counts[client] - 1])
    own = jax.tree.map(lambda leaf: leaf[client], (params, hyper))
    batches = [jax.tree.map(lambda leaf, order=order: leaf[client][order], data.examples) for order in (some, 0 * some)]
    bare = replace(problem, penalty=None, outer_penalty=None)  # without penalties, the check is compiled once
    together, alone = (float(each) for each in _first_losses(cost, bare, *own, *batches))
    if np.isfinite([together, alone]).all() and abs(together - alone) > APART * max(abs(together), abs(alone)):
        given = "a cost whose loss of one example depends on the other examples of its batch"
        allowed = "losses of single examples, as clients own different numbers of them; or hp.Batch.cost(function)"
        raise InvalidInput(field, given, allowed)


@eqx.filter_jit
def _first_losses(cost: Cost, problem: Problem, params: PyTree, hyper: PyTree, one: PyTree, other: PyTree) -> Any:
    """Return the loss of the first example of each of two batches, at randomly moved params."""
    vector, back = ravel_pytree(params)
    moved = back(vector + 0.1 * jax.random.normal(jax.random.key(0), vector.shape, vector.dtype))
    return [problem._losses(cost, moved, hyper, batch)[0] for batch in (one, other)]


def find_hypers(problem: Problem, params: PyTree, hyper: PyTree, data: Data) -> tuple[str, ...]:
    """Return the names of the costs and penalties that contain the hypers, from one client's shapes.

    Raises:
        InvalidInput: A cost or penalty does not fit the params, the hypers, the data, or a private task.
    """
    found = []
    if isinstance(problem.outer, JointCost):
        shown = _uses_hyper("task.outer.represent", problem, problem.outer.represent, params, hyper, dimensions=1)
        found += ["outer"] * shown
    for name, cost, examples in _costs(problem, data):
        uses = check_cost(f"task.{name}", problem, cost, params, hyper, examples)
        _check_uses(name, problem, uses)
        found += [name] * uses.hyper
    for name, penalty in (("penalty", problem.penalty), ("outer_penalty", problem.outer_penalty)):
        if penalty is not None and _uses_hyper(f"task.{name}", problem, penalty, params, hyper, dimensions=0):
            found.append(name)
    return tuple(found)


def _costs(problem: Problem, data: Data) -> Iterator[tuple[str, Cost, PyTree]]:
    """Yield each client's own costs: name, function and examples."""
    yield "inner", problem.inner, data.train
    if not isinstance(problem.outer, JointCost):
        yield "outer", problem.outer, data.outer
    elif problem.outer.own is not None:
        yield "outer.own", problem.outer.own, data.outer


def _check_uses(name: str, problem: Problem, uses: Uses) -> None:
    """Raise `InvalidInput` for a cost whose dependence on params and hypers does not fit the task.

    A cost must use its params, and return one loss per example on a private task. An outer cost on other data than
    `train` must not use hypers of training examples.
    """
    if not uses.params and (name == "inner" or not uses.hyper):
        allowed = "a function that depends on its first argument, the params"
        raise InvalidInput(f"task.{name}", "a cost that ignores its params", allowed)
    if problem.private and uses.scalar:
        allowed = "one loss per example: each example's part is clipped on a private task"
        raise InvalidInput(f"task.{name}", "a cost that returns one scalar", allowed)
    by_example = any(used and rows for used, rows in zip(uses.leaves, problem.by_example, strict=True))
    if name == "outer" and problem.outer_on != "train" and by_example:
        allowed = "a cost without them: they belong to the training examples, one to each"
        raise InvalidInput("task.outer", "a cost that uses hypers made by hp.per_example", allowed)


def _uses_hyper(
    field: str, problem: Problem, function: Penalty, params: PyTree, hyper: PyTree, dimensions: Literal[0, 1]
) -> bool:
    """Return True if a function of (params, hyper) depends on its hyper.

    Raise `InvalidInput` if the function fails, or if its result does not have this number of dimensions.
    """

    def value(params: PyTree, hyper: PyTree) -> Any:
        return function(problem.whole(params), hyper)

    shape, uses = _trace(field, value, (params, hyper), "(params, hyper)")
    leaves = jax.tree.leaves(shape)
    if len(leaves) != 1 or leaves[0].ndim != dimensions or not jnp.issubdtype(leaves[0].dtype, jnp.floating):
        raise InvalidInput(field, f"a function that returns {shape}", f"one real {('scalar', 'vector')[dimensions]}")
    return any(uses[1])


def _trace(
    field: str, function: Callable[..., Any], shapes: tuple[PyTree, ...], takes: str
) -> tuple[Any, tuple[bool, tuple[bool, ...]]]:
    try:
        jaxpr, shape = jax.make_jaxpr(function, return_shape=True)(*shapes)
    except InvalidInput:
        raise
    except Exception as error:  # a user's function may raise anything: name the function and the error
        said = f"{type(error).__name__}: {error}".splitlines()[0]
        allowed = f"a function of {takes} for one client, without the client axis"
        raise InvalidInput(field, f"a function that fails with {said}", allowed) from error
    _, used = dce_jaxpr(jaxpr.jaxpr, [True] * len(jaxpr.jaxpr.outvars))
    sizes = np.cumsum([len(jax.tree.leaves(part)) for part in shapes])
    return shape, (any(used[: sizes[0]]), tuple(used[sizes[0] : sizes[1]]))
