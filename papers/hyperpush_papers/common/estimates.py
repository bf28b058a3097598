"""Record the iterates of an estimator's loop and the messages sent so far, or return them from a pure function."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PRNGKeyArray, PyTree

from hyperpush.engines.faults import Faults
from hyperpush.engines.result import Recorders, RunResult
from hyperpush.engines.simulate import Simulate, evaluate
from hyperpush.hypergradients.base import HypergradientEstimator, HypergradientState
from hyperpush.hypergradients.recurrent import known_links
from hyperpush.hypergradients.tree_cg import TreeCG
from hyperpush.networks import Network
from hyperpush.programs import Context, Node, ProgramRecipe, program_of
from hyperpush.task.problem import Problem
from hyperpush.task.task import Task
from hyperpush.verbs.call import last_point


def run_recorded(
    task: Task,
    method: HypergradientEstimator,
    network: Network,
    key: PRNGKeyArray,
    record: Recorders,
    faults: Faults | None = None,
) -> RunResult:
    """Run an estimator and return its records by loop, with clocks that count the messages sent so far."""
    program, states = _prepare(task, method, network)
    return Simulate(faults=faults).run(program, network, states, task.data, key, record=record)


def records(
    task: Task, method: HypergradientEstimator, network: Network, key: PRNGKeyArray, record: Recorders
) -> dict[str, PyTree]:
    """Return the records by loop, clients on axis 1; a pure function, for `vmap` over keys, params or settings.

    After a divergence all values are NaN or infinite.
    """
    # a copy, so that values the task caches while it is traced are not kept after tracing
    own = task.at(point=task.point)
    program, states = _prepare(own, method, network)
    return evaluate(program, network, states, own.data, key, record=record)[1]


def current_value(state: Any, ctx: Context) -> PyTree:
    """Return the current estimate, for loops whose states have a field `value`."""
    return state.value


def _prepare(task: Task, method: HypergradientEstimator, network: Network) -> tuple[ProgramRecipe, HypergradientState]:
    method = method.bind(network, None, task)
    zeros = jax.tree.map(jnp.zeros_like, task.hypers)
    states = HypergradientState(
        task.params, task.hypers, zeros, known_links(method, network, last_point(task, network), task)
    )
    recipe = program_of(method, task.problem)
    return replace(recipe, build=_estimate_alone) if isinstance(method, TreeCG) else recipe, states


def _estimate_alone(method: TreeCG, problem: Problem) -> Node:
    """Return TreeCG's program without the check of the params, whose loop would enclose the recorded loops."""
    return problem.protect(method.estimate_on(problem, "tree"))
