"""Estimates at a task's params with more to see than `hp.hypergradient` shows."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PRNGKeyArray, PyTree

from hyperpush.engines.result import Recorders, RunResult
from hyperpush.engines.simulate import Simulate
from hyperpush.hypergradients.base import HypergradientEstimator, HypergradientState
from hyperpush.networks import Network
from hyperpush.programs import Context, Recipe, evaluate, program_of
from hyperpush.task import Task
from hyperpush.verbs import known_links


def run(
    task: Task, method: HypergradientEstimator, network: Network, key: PRNGKeyArray, record: Recorders
) -> RunResult:
    """A run with its clocks: what had been sent at every record."""
    program, states = _prepared(task, method, network)
    return Simulate().run(program, network, states, task.data, key, record=record)


def recorded(
    task: Task, method: HypergradientEstimator, network: Network, key: PRNGKeyArray, record: Recorders
) -> dict[str, PyTree]:
    """The records by loop, clients on axis 1, as a pure function: to be vmapped over keys, params or numbers."""
    own = task.at()  # what a task computes in a function that is traced must not outlive it
    program, states = _prepared(own, method, network)
    return evaluate(program, network, states, own.data, key, record=record)[1]


def current_value(state: Any, ctx: Context) -> PyTree:
    """The estimate so far, for loops whose states have it."""
    return state.value


def _prepared(task: Task, method: HypergradientEstimator, network: Network) -> tuple[Recipe, HypergradientState]:
    method = method.on(network)
    zeros = jax.tree.map(jnp.zeros_like, task.hypers)
    states = HypergradientState(task.params, task.hypers, zeros, known_links(method, network, None, task))
    return program_of(method, task.problem), states
