"""Bilevel algorithms that move params and hypers together, behind one interface.

With outer consensus and unlike clients they end at different points (mathematics.md): x_G, the minimiser of the mean
outer cost at the common inner solution; x_L, where the mean of the clients' own hyper-gradients at their own inner
solutions is zero; x_M, the same with each client's own Hessian at the common inner solution.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import PRNGKeyArray, PyTree

from hyperpush.data.batches import Data
from hyperpush.engine import simulate
from hyperpush.engine.outcome import Outcome, Record
from hyperpush.estimators.estimate import check_network
from hyperpush.estimators.state import Declaration
from hyperpush.networks import Network
from hyperpush.problem import Problem, check
from hyperpush.program import Node, program_of

LOOP = "iterations"  # the name of every algorithm's outermost loop


class Bilevel(eqx.Module):
    """What a client starts from and ends with: its params (inner) and its hyper (outer)."""

    params: PyTree
    hyper: PyTree


@runtime_checkable
class Algorithm(Protocol):
    """A bilevel algorithm: a frozen module whose fields are its options."""

    declares: ClassVar[Declaration]

    def program(self, problem: Problem) -> Node:
        """The algorithm as a program on `Bilevel` states whose loop is called `LOOP`; the client's data are `Data`.

        The states inside that loop have the fields `params` and `hyper`.
        """
        ...


@dataclass(frozen=True)
class Optimum:
    """Where an algorithm ended, clients on axis 0, and what it cost."""

    params: PyTree
    hypers: PyTree
    history: PyTree  # what was recorded, by record; None without
    rounds: int
    floats: int  # numbers each client sent
    hessian_products: int
    jacobian_products: int
    gradients: int
    step: int  # network time afterwards


def optimise(
    problem: Problem,
    algorithm: Algorithm,
    network: Network,
    params: PyTree,
    hypers: PyTree,
    inner_data: PyTree,
    outer_data: PyTree,
    key: PRNGKeyArray,
    *,
    record: Record | None = None,
    run: Callable[..., Outcome] = simulate.run,
    **options: Any,
) -> Optimum:
    """Run a bilevel algorithm from `params` and `hypers` (clients on axis 0).

    `record(state, context)` is called after every `every`-th iteration; its results are the history. `run` is the
    engine; further options go to it (`every`, `progress`, …).
    """
    data = jax.tree.map(jnp.asarray, Data(inner_data, outer_data))
    params, hypers = (jax.tree.map(jnp.asarray, tree) for tree in (params, hypers))
    check(problem, params, hypers, data, network.clients)
    check_network(algorithm, network)
    recorders = None if record is None else {LOOP: record}
    outcome = run(
        program_of(algorithm, problem), network, Bilevel(params, hypers), data, key, record=recorders, **options
    )
    found: Bilevel = outcome.states
    history = None if record is None else outcome.history.get(LOOP)
    return Optimum(found.params, found.hyper, history, **outcome.costs)
