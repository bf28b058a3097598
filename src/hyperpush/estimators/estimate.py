"""Estimate the hyper-gradient of a problem at a point, on a network, with an estimator of one's choice."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import PRNGKeyArray, PyTree

from hyperpush.data.batches import Data
from hyperpush.engine import simulate
from hyperpush.engine.compiled import Outcome, Record
from hyperpush.estimators.state import Hyper
from hyperpush.networks import Network
from hyperpush.problem import Problem, check
from hyperpush.program import Node


@runtime_checkable
class Estimator(Protocol):
    """An estimator: a frozen module whose fields are its options."""

    def program(self, problem: Problem) -> Node:
        """The estimator as a program on `Hyper` states; the client's data are `Data`."""
        ...


@dataclass(frozen=True)
class Estimate:
    """A hyper-gradient and what it cost."""

    value: PyTree  # every client's d_{λ_i} F̄, clients on axis 0
    rounds: int  # rounds of communication
    floats: int  # numbers each client sent
    step: int  # network time afterwards
    history: dict[str, PyTree]


@lru_cache(maxsize=256)
def program_of(method: Any, problem: Problem) -> Node:
    """A method's program for a problem; the same object for the same pair, so that nothing is compiled twice."""
    return method.program(problem)


def start(params: PyTree, hypers: PyTree) -> Hyper:
    """The states that an estimator's program starts from."""
    params, hypers = (jax.tree.map(jnp.asarray, tree) for tree in (params, hypers))
    return Hyper(params, hypers, jax.tree.map(jnp.zeros_like, hypers))


def hypergradient(
    problem: Problem,
    estimator: Estimator,
    network: Network,
    params: PyTree,
    hypers: PyTree,
    inner_data: PyTree,
    outer_data: PyTree,
    key: PRNGKeyArray,
    *,
    run: Callable[..., Outcome] = simulate.run,
    record: Mapping[str, Record] | None = None,
    **options: Any,
) -> Estimate:
    """Every client's derivative of the mean outer cost by its own hyper-parameters.

    `params`, `hypers` and the data have the clients on axis 0. `run` is the engine (`hp.simulate.run`, `hp.shard.run`);
    further options go to it (`step`, `batch`, `progress`, …).
    """
    data = jax.tree.map(jnp.asarray, Data(inner_data, outer_data))
    check(problem, params, hypers, data, network.clients)
    program = program_of(estimator, problem)
    outcome = run(program, network, start(params, hypers), data, key, record=record, **options)
    return Estimate(outcome.states.value, outcome.rounds, outcome.floats, outcome.step, outcome.history)
