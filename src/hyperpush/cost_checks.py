"""What one client's costs use and return, found from shapes; what does not fit is refused by name."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters.partial_eval import dce_jaxpr
from jaxtyping import PyTree

from hyperpush.data.batches import BatchCost, Ragged, capacity, everything
from hyperpush.errors import InvalidInput
from hyperpush.problem import Cost, JointCost, Penalty, Problem


class Uses(NamedTuple):
    """What a cost depends on, and whether it returns one scalar for all examples."""

    params: bool
    leaves: tuple[bool, ...]  # of the hypers
    scalar: bool

    @property
    def hyper(self) -> bool:
        return any(self.leaves)


def check_cost(
    field: str, problem: Problem, cost: Cost, params: PyTree, hyper: PyTree, examples: PyTree, metric: bool = False
) -> Uses:
    """What a cost uses and returns, from shapes; refuses one that fails or returns something else.

    A metric may return whole numbers and truth values, too.
    """

    def value(params: PyTree, hyper: PyTree, data: PyTree) -> Any:
        return problem._losses(cost, params, hyper, everything(data))

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
            "one loss per example, as clients own different numbers; or hp.Batch.cost(function), which gets a mask"
        )
        raise InvalidInput(field, "a cost that returns one scalar", allowed)
    return Uses(uses_params, uses_hyper, found.shape == ())


def check_penalty(field: str, problem: Problem, penalty: Penalty, params: PyTree, hyper: PyTree) -> bool:
    """Whether a penalty uses its hyper; refuses one that fails or returns something else."""
    shape, uses = _trace(
        field, lambda params, hyper: penalty(problem.whole(params), hyper), (params, hyper), "(params, hyper)"
    )
    leaves = jax.tree.leaves(shape)
    if len(leaves) != 1 or leaves[0].shape != () or not jnp.issubdtype(leaves[0].dtype, jnp.floating):
        raise InvalidInput(field, f"a penalty that returns {shape}", "one real scalar")
    return any(uses[1])


def check_shown(field: str, problem: Problem, cost: JointCost, params: PyTree, hyper: PyTree) -> bool:
    """Whether what a client shows uses its hyper; refuses what is no vector."""
    shape, uses = _trace(
        field, lambda params, hyper: cost.represent(problem.whole(params), hyper), (params, hyper), "(params, hyper)"
    )
    leaves = jax.tree.leaves(shape)
    if len(leaves) != 1 or len(leaves[0].shape) != 1 or not jnp.issubdtype(leaves[0].dtype, jnp.floating):
        raise InvalidInput(field, f"a function that returns {shape}", "one real vector")
    return any(uses[1])


def _trace(
    field: str, function: Callable[..., Any], shapes: tuple[PyTree, ...], takes: str
) -> tuple[Any, tuple[bool, tuple[bool, ...]]]:
    try:
        jaxpr, shape = jax.make_jaxpr(function, return_shape=True)(*shapes)
    except InvalidInput:
        raise
    except Exception as error:  # the function is the user's: whatever it raises, say which one and what
        said = f"{type(error).__name__}: {error}".splitlines()[0]
        allowed = f"a function of {takes} for one client, without the client axis"
        raise InvalidInput(field, f"a function that fails with {said}", allowed) from error
    _, used = dce_jaxpr(jaxpr.jaxpr, [True] * len(jaxpr.jaxpr.outvars))
    sizes = np.cumsum([len(jax.tree.leaves(part)) for part in shapes])
    return shape, (any(used[: sizes[0]]), tuple(used[sizes[0] : sizes[1]]))
