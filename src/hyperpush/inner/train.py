"""Solve the inner problem alone."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PRNGKeyArray, PyTree

from hyperpush.data.batches import Data
from hyperpush.engine import simulate
from hyperpush.engine.outcome import Outcome
from hyperpush.inner.step import LinkEstimates, Solver, Trained
from hyperpush.networks import Network
from hyperpush.problem import Problem, check
from hyperpush.program import program_of


@dataclass(frozen=True)
class Training:
    """What training found, clients on axis 0, and what it cost."""

    params: PyTree
    links: LinkEstimates | None  # what every client saw of the network, if the solver observes
    rounds: int
    floats: int  # numbers each client sent
    hessian_products: int  # with ∂²_xx f, that each client computed
    jacobian_products: int  # with ∂²_λx f
    gradients: int  # gradients of f
    step: int  # network time afterwards
    history: dict[str, PyTree]


def train(
    problem: Problem,
    solver: Solver,
    network: Network,
    params: PyTree,
    hypers: PyTree,
    inner_data: PyTree,
    key: PRNGKeyArray,
    *,
    run: Callable[..., Outcome] = simulate.run,
    **options: Any,
) -> Training:
    """Run an inner solver from `params` (clients on axis 0). `run` is the engine; further options go to it."""
    params, hypers, inner = jax.tree.map(jnp.asarray, (params, hypers, inner_data))
    data = Data(inner, inner)
    check(Problem(problem.inner, problem.inner), params, hypers, data, network.clients)
    outcome = run(program_of(solver, problem), network, Trained(params, hypers), data, key, **options)
    found: Trained = outcome.states
    return Training(found.params, found.links, history=outcome.history, **outcome.costs)
