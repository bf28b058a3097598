"""Personalised decentralised bilevel optimisation: every client tunes its own hyper-parameters for everybody's good."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import PRNGKeyArray, PyTree

from hyperpush.data.batches import Data, everything
from hyperpush.engine import simulate
from hyperpush.engine.compiled import Outcome
from hyperpush.errors import InvalidInput
from hyperpush.estimators.estimate import Estimator
from hyperpush.estimators.state import Hyper
from hyperpush.inner.step import Solver, Trained
from hyperpush.inner.train import program_of
from hyperpush.networks import Network
from hyperpush.problem import Problem, check
from hyperpush.program import Local, Node, Repeat, Sequence, Within


class _State(eqx.Module):
    first: PyTree  # where every inner solve starts from, unless it continues
    params: PyTree
    hyper: PyTree
    value: PyTree  # the last hyper-gradient
    memory: optax.OptState


@dataclass(frozen=True)
class Solution:
    """What `solve` found, clients on axis 0, and what it cost."""

    params: PyTree  # the inner solution for `hypers`
    hypers: PyTree
    outer_costs: PyTree  # each client's F_i before every outer step, [outer steps, clients]
    hypergradients: PyTree  # by outer step, leaves [outer steps, clients, …]
    rounds: int
    floats: int
    step: int


def program(
    problem: Problem,
    inner: Solver,
    estimator: Estimator,
    outer: optax.GradientTransformation,
    outer_steps: int,
    restart: bool,
) -> Node:
    """Inner solve, hyper-gradient, step of the hypers, `outer_steps` times; then the inner solve once more."""

    def start_inner(state: _State, ctx):
        return Trained(state.first if restart else state.params, state.hyper)

    def end_inner(state: _State, trained: Trained, ctx):
        return _State(state.first, trained.params, state.hyper, state.value, state.memory)

    def start_estimate(state: _State, ctx):
        return Hyper(state.params, state.hyper, jax.tree.map(jnp.zeros_like, state.hyper))

    def end_estimate(state: _State, found: Hyper, ctx):
        return _State(state.first, state.params, state.hyper, found.value, state.memory)

    def improve(state: _State, ctx):
        updates, memory = outer.update(state.value, state.memory, state.hyper)
        return _State(state.first, state.params, optax.apply_updates(state.hyper, updates), state.value, memory)

    solve_inner = Within(program_of(inner, problem), start_inner, end_inner)
    estimate = Within(program_of(estimator, problem), start_estimate, end_estimate)
    return Sequence(Repeat(Sequence(solve_inner, estimate, Local(improve)), outer_steps, name="outer"), solve_inner)


_program = lru_cache(maxsize=64)(program)


@lru_cache(maxsize=64)
def _recorder(problem: Problem) -> Callable[..., Any]:
    def record(state: _State, ctx):
        # The step is over: `hyper` is new, but `params` still solve the problem the gradient was taken at.
        return problem.outer(state.params, state.hyper, everything(ctx.data.outer)), state.value

    return record


def solve(
    problem: Problem,
    network: Network,
    *,
    inner: Solver,
    hypergradient: Estimator,
    outer: optax.GradientTransformation,
    outer_steps: int,
    params: PyTree,
    hypers: PyTree,
    inner_data: PyTree,
    outer_data: PyTree,
    key: PRNGKeyArray,
    restart: bool = True,
    run: Callable[..., Outcome] = simulate.run,
    **options: Any,
) -> Solution:
    """Lower everybody's mean outer cost: each client moves its own hypers along its hyper-gradient.

    `inner` solves the inner problem (`SGP`, …), from `params` before every outer step, or from where it stands with
    `restart=False`. `outer` is any Optax optimiser. `run` is the engine; further options go to it (`progress`, …).
    """
    if outer_steps < 0:
        raise InvalidInput("outer_steps", outer_steps, "0 or more")
    data = jax.tree.map(jnp.asarray, Data(inner_data, outer_data))
    params, hypers = (jax.tree.map(jnp.asarray, tree) for tree in (params, hypers))
    check(problem, params, hypers, data, network.clients)
    start = _State(params, params, hypers, jax.tree.map(jnp.zeros_like, hypers), jax.vmap(outer.init)(hypers))
    tree = _program(problem, inner, hypergradient, outer, outer_steps, restart)
    outcome = run(tree, network, start, data, key, record={"outer": _recorder(problem)}, **options)
    costs, gradients = outcome.history.get("outer", (None, None))
    return Solution(
        outcome.states.params, outcome.states.hyper, costs, gradients, outcome.rounds, outcome.floats, outcome.step
    )
