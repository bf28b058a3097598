"""Personalised decentralised bilevel optimisation: every client tunes its own hyper-parameters for everybody's good."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from hyperpush.checks import whole
from hyperpush.data.batches import Data, everything
from hyperpush.engine import simulate
from hyperpush.engine.compiled import Outcome
from hyperpush.estimators.estimate import Estimator, check_network, known_links
from hyperpush.estimators.state import Hyper
from hyperpush.inner.step import LinkEstimates, Solver, Trained
from hyperpush.networks import Network
from hyperpush.problem import Problem, check
from hyperpush.program import Local, Node, Repeat, Sequence, Within, program_of


class _State(eqx.Module):
    first: PyTree  # where every inner solve starts from, unless it continues
    params: PyTree
    hyper: PyTree
    value: PyTree  # the last hyper-gradient
    cost: Float[Array, "*clients"]  # the own outer cost where it was taken
    memory: optax.OptState
    links: LinkEstimates | None  # what is known of the links, for estimators that reverse them


@dataclass(frozen=True)
class Solution:
    """What `solve` found, clients on axis 0, and what it cost."""

    params: PyTree  # the inner solution for `hypers`
    hypers: PyTree
    outer_costs: (
        Array  # each client's F_i(x*(λ), λ_i) before each outer step and at the end, [outer steps + 1, clients]
    )
    hypergradients: PyTree  # by outer step, leaves [outer steps, clients, …]; None without any
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
        cost = problem.outer(trained.params, state.hyper, everything(ctx.data.outer))
        links = state.links if trained.links is None else trained.links
        return _State(state.first, trained.params, state.hyper, state.value, cost, state.memory, links)

    def start_estimate(state: _State, ctx):
        return Hyper(state.params, state.hyper, jax.tree.map(jnp.zeros_like, state.hyper), state.links)

    def end_estimate(state: _State, found: Hyper, ctx):
        return _State(state.first, state.params, state.hyper, found.value, state.cost, state.memory, state.links)

    def improve(state: _State, ctx):
        updates, memory = outer.update(state.value, state.memory, state.hyper)
        hyper = optax.apply_updates(state.hyper, updates)
        return _State(state.first, state.params, hyper, state.value, state.cost, memory, state.links)

    solve_inner = Within(program_of(inner, problem), start_inner, end_inner)
    estimate = Within(program_of(estimator, problem), start_estimate, end_estimate)
    return Sequence(Repeat(Sequence(solve_inner, estimate, Local(improve)), outer_steps, name="outer"), solve_inner)


_program = lru_cache(maxsize=64)(program)


def _record(state: _State, ctx):
    return state.cost, state.value


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
    `restart=False`. `outer` is any Optax optimiser (keep the object between calls: a new one is compiled anew). `run`
    is the engine; further options go to it (`progress`, …).
    """
    whole("outer_steps", outer_steps, least=0)
    data = jax.tree.map(jnp.asarray, Data(inner_data, outer_data))
    params, hypers = (jax.tree.map(jnp.asarray, tree) for tree in (params, hypers))
    check(problem, params, hypers, data, network.clients)
    check_network(hypergradient, network)
    links = None if hypergradient.declares.needs == "any" else known_links(network)
    zeros = jax.tree.map(jnp.zeros_like, hypers)
    start = _State(params, params, hypers, zeros, jnp.zeros(network.clients), jax.vmap(outer.init)(hypers), links)
    tree = _program(problem, inner, hypergradient, outer, outer_steps, restart)
    outcome = run(tree, network, start, data, key, record={"outer": _record}, **options)
    found: _State = outcome.states
    costs, gradients = outcome.history.get("outer", (jnp.zeros((0, network.clients)), None))
    return Solution(
        found.params,
        found.hyper,
        jnp.concatenate([costs, found.cost[None]]),
        gradients,
        outcome.rounds,
        outcome.floats,
        outcome.step,
    )
