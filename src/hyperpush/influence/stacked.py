"""Pose several runs as one problem, with the same data, and with the params and weights of all runs stacked."""

from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, PyTree

from hyperpush.base.checks import check_integer
from hyperpush.base.errors import InvalidInput
from hyperpush.data.batches import full_batch
from hyperpush.engines.compiled.compile import call
from hyperpush.engines.compiled.effort import level_of_one_run
from hyperpush.influence.weights import Weights, check_weights
from hyperpush.task.problem import Cost, Penalty, Problem
from hyperpush.task.task import Task


def over_runs(
    function: Callable[..., Float[Array, "..."]], params: PyTree, *own: Array, axes: tuple[int, ...] = ()
) -> Float[Array, "k ..."]:
    """Apply a function of params to each of k runs, which are on axis 0 of params and on `axes` of the other arrays."""
    arrays, rest = eqx.partition(params, eqx.is_array)  # modules also have non-array leaves

    def one(x: PyTree, *own: Array) -> Float[Array, "..."]:
        return function(eqx.combine(x, rest), *own)

    return jax.vmap(one, in_axes=(0, *axes))(arrays, *own)


class Summed(eqx.Module):
    """Sum of a cost or penalty over k runs with stacked params and weights: its gradient stacks the runs' gradients.

    A cost returns one number per example, because the library takes the mean over examples.
    """

    function: Cost | Penalty

    def __call__(self, params: PyTree, hyper: Weights, *batch: PyTree) -> Float[Array, "..."]:
        def one(x: PyTree, examples: Array, client: Array) -> Float[Array, "..."]:
            return self.function(x, Weights(examples, client, hyper.own), *batch)

        return jnp.sum(over_runs(one, params, hyper.examples, hyper.client, axes=(1, 0)), axis=0)


class Pulled(eqx.Module):
    """Penalty plus the linear term pullᵀx of the params x, where `pull` is the second part of the hyper.

    The linear term moves the optimum of a changed problem back to the params at which an estimate is made. With
    `asked`, the hypergradient by the pull is minus the solution of the estimator's linear system. Without `asked`, it
    is 0.
    """

    penalty: Penalty | None
    asked: bool = eqx.field(static=True, default=False)

    def __call__(self, params: PyTree, hyper: tuple[Any, ...]) -> Float[Array, ""]:
        numbers = eqx.filter(params, eqx.is_inexact_array)  # modules also have non-array leaves
        weights, pull = hyper[:2]
        if self.asked:
            weights = jax.lax.stop_gradient(weights)
        else:
            pull = jax.lax.stop_gradient(pull)
        added = jnp.asarray(optax.tree.vdot(pull, numbers))
        return added if self.penalty is None else self.penalty(params, weights) + added


def take_weights(hyper: tuple[Any, ...]) -> Weights:
    """Return the weights, which are the first part of the hyper."""
    return hyper[0]


def hold_weights(hyper: tuple[Any, ...]) -> Weights:
    """Return the weights, the first part of the hyper, as constants without derivatives."""
    return jax.lax.stop_gradient(hyper[0])


def repeat_params(params: PyTree, runs: int, axis: int) -> PyTree:
    """Return copies of the params for several runs, stacked on a new axis `axis`."""
    return jax.tree.map(lambda leaf: jnp.repeat(jnp.expand_dims(leaf, axis), runs, axis=axis), params)


def stack_weights(task: Task, weights: Sequence[Weights]) -> Weights:
    """Stack the weights of all runs of a simulation on the last axis, because examples are looked up on the first."""
    return Weights(
        jnp.stack([each.examples for each in weights], axis=2),
        jnp.stack([each.client for each in weights], axis=1),
        task.hypers,
    )


def split_runs(task: Task, weights: Any, at_once: int) -> list[list[Weights]]:
    """Check weights, and split them into parts of equal length, so that one compiled program runs all parts.

    The last part is padded by repeating its last weights.
    """
    check_integer("at_once", at_once, minimum=1)
    if isinstance(weights, Weights) or not isinstance(weights, Sequence):
        raise InvalidInput("weights", type(weights).__name__, "a list of weights, one for each run")
    if not weights:
        raise InvalidInput("weights", weights, "at least one set of weights")
    check_weights(task, weights)
    parts = -(-len(weights) // at_once)
    size = -(-len(weights) // parts)
    split = [list(weights[first : first + size]) for first in range(0, len(weights), size)]
    split[-1] += split[-1][-1:] * (size - len(split[-1]))
    return split


def outer_costs(task: Task, params: PyTree) -> Float[np.ndarray, "k n"]:
    """Return every client's F in each of k runs, runs on axis 0 of the params and clients on axis 1."""
    found = call(_outer_costs, (task.problem, params, task.hypers, task.data.outer), level=level_of_one_run)
    return np.asarray(found, np.float64)


def _outer_costs(given: tuple[Problem, PyTree, PyTree, PyTree], donated: None) -> Float[Array, "k n"]:
    problem, params, hypers, outer = given

    def own(params: PyTree, hyper: PyTree, examples: PyTree) -> Float[Array, " k"]:
        return jax.vmap(lambda x: problem.outer_cost(x, hyper, full_batch(examples)))(params)

    return jax.vmap(own, in_axes=(1, 0, 0), out_axes=1)(params, hypers, outer)
