"""Bilevel optimisation among clients: inner solve, hyper-gradient, step of the hypers.

Without `consensus` every client keeps hypers of its own and lowers everybody's mean cost: PDBO. With it all agree on
one: CDBO; CDBO-Local if, besides, everyone trains alone (`inner=Alone(…)`, `hypergradient=LocalGradient()`). All three
after "Personalized decentralized bilevel optimization over stochastic and directed networks".
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from hyperpush.bilevel.consensus import OuterConsensus
from hyperpush.bilevel.history import History, spent
from hyperpush.bilevel.stopping import EarlyStopping, Watch
from hyperpush.checks import whole
from hyperpush.data.batches import Data, everything
from hyperpush.engine import simulate
from hyperpush.engine.layout import one_client
from hyperpush.engine.outcome import Outcome
from hyperpush.errors import InvalidInput
from hyperpush.estimators.estimate import Estimator, check_network, known_links
from hyperpush.estimators.state import Hyper
from hyperpush.inner.step import LinkEstimates, Solver, Trained
from hyperpush.networks import Network
from hyperpush.privacy.budget import budget
from hyperpush.problem import Problem, check
from hyperpush.program import Context, Exchange, Inbox, Local, Repeat, Sequence, Within, children, program_of, survey

TRACED = 10_000_000  # numbers of all clients' hypers over all outer steps that a history holds without being asked


class _State(eqx.Module):
    first: PyTree  # where every inner solve starts from, unless it continues
    params: PyTree
    hyper: PyTree
    value: PyTree  # the last hyper-gradient
    cost: Float[Array, "*clients"]  # the own outer cost at (params, hyper)
    optimizer: optax.OptState
    links: LinkEstimates | None  # what is known of the links, for estimators that reverse them
    memory: PyTree  # the estimator's, from one outer step to the next
    shared: Any  # the client's part of the consensus (`Shared`); None without
    watch: Watch | None  # of the metric; None without early stopping


@dataclass(frozen=True)
class Solution:
    """What `solve` found, clients on axis 0, and what it cost."""

    params: PyTree  # the inner solution for `hypers`
    hypers: PyTree  # of the last outer step; with early stopping, of the best
    best_step: int  # how many outer steps lead to them
    history: History
    rounds: int
    floats: int  # numbers each client sent
    hessian_products: int  # products with ∂²_xx f that each client computed
    jacobian_products: int  # products with ∂²_λx f
    gradients: int  # gradients of f and F
    step: int  # network time afterwards

    @property
    def outer_costs(self) -> Array:
        """Each client's F_i(x*(λ), λ_i) before every outer step and at the end, [outer steps + 1, clients]."""
        return self.history.outer_costs

    @property
    def hypergradients(self) -> PyTree:
        """By outer step, leaves [outer steps, clients, …]; None without any, or if the run was not traced."""
        return self.history.hypergradients


def program(
    problem: Problem,
    inner: Solver,
    estimator: Estimator,
    outer: optax.GradientTransformation,
    outer_steps: int,
    restart: bool,
    consensus: OuterConsensus | None = None,
    stop: EarlyStopping | None = None,
    agreement: int = 0,
) -> Sequence:
    """The inner solve; then hyper-gradient, step of the hypers and inner solve, `outer_steps` times or until `stop`.

    `agreement` is the number of rounds in which a maximum reaches everyone.
    """

    def start_inner(state: _State, ctx: Context):
        return Trained(state.first if restart else state.params, state.hyper)

    def end_inner(state: _State, trained: Trained, ctx: Context):
        cost = problem.outer(trained.params, state.hyper, everything(ctx.data.outer)).astype(state.cost.dtype)
        # What the solver saw of the links matters only to an estimator that asks for it.
        links = state.links if state.links is None or trained.links is None else trained.links
        return replace(state, params=trained.params, cost=cost, links=links)

    def start_estimate(state: _State, ctx: Context):
        zeros = jax.tree.map(jnp.zeros_like, state.hyper)
        return Hyper(state.params, state.hyper, zeros, state.links, state.memory)

    def end_estimate(state: _State, found: Hyper, ctx: Context):
        return replace(state, value=found.value, memory=found.memory)

    def improve(state: _State, ctx: Context):
        updates, optimizer = outer.update(state.value, state.optimizer, state.hyper)
        return replace(state, hyper=optax.apply_updates(state.hyper, updates), optimizer=optimizer)

    def improve_together(consensus: OuterConsensus):
        # Estimates of d_{λ_i} F̄ add up to the derivative by a common λ, those of the own cost average to it.
        adds_up = estimator.declares.aim == "global"

        def improve(state: _State, ctx: Context):
            gradient = jax.tree.map(lambda v: v * ctx.clients if adds_up else v, state.value)
            shared, gradient = consensus.aim(state.shared, gradient)
            updates, optimizer = outer.update(gradient, state.optimizer, state.hyper)
            return replace(state, shared=consensus.move(shared, updates), optimizer=optimizer)

        def receive(state: _State, inbox: Inbox, ctx: Context):
            shared = consensus.receive(state.shared, inbox)
            return replace(state, shared=shared, hyper=shared.hyper)

        push = Exchange(lambda state, ctx: state.shared.message, receive, conserved=True)
        return Sequence(Local(improve), Repeat(push, consensus.pushes, name="consensus"))

    solved = Within(program_of(inner, problem), start_inner, end_inner)
    estimated = Within(program_of(estimator, problem), start_estimate, end_estimate)
    improved = Local(improve) if consensus is None else improve_together(consensus)
    until = None if stop is None else lambda state, ctx: stop.ended(state.watch)
    if stop is not None:
        solved = Sequence(solved, stop.program(agreement))
    return Sequence(
        Repeat(solved, 1, name="start"),
        Repeat(Sequence(estimated, improved, solved), outer_steps, until=until, name="outer"),
    )


_program = lru_cache(maxsize=64)(program)


def _record(state: _State, ctx: Context):
    watched = None if state.watch is None else (state.watch.own, state.watch.mean)
    return state.cost, watched, optax.tree.norm(state.value).astype(state.cost.dtype)


def _record_all(state: _State, ctx: Context):
    return _record(state, ctx), state.hyper, state.value


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
    consensus: OuterConsensus | None = None,
    stop: EarlyStopping | None = None,
    trace: bool | None = None,
    run: Callable[..., Outcome] = simulate.run,
    **options: Any,
) -> Solution:
    """Lower everybody's mean outer cost: each client moves its own hypers along its hyper-gradient.

    `inner` solves the inner problem (`SGP`, …), from `params` before every outer step, or from where it stands with
    `restart=False`. `outer` is any Optax optimiser (keep the object between calls: a new one is compiled anew). An
    estimator with a method `memory(params, hyper)` finds what it left in `Hyper.memory` again at the next outer step.

    `consensus=OuterConsensus()` makes the clients' hypers agree (CDBO); with `inner=Alone(…)` and
    `hypergradient=LocalGradient()` besides, every client's params are its own (CDBO-Local). Other pairs run too, but
    lower no one's cost in particular: `LocalGradient` after `SGP`, say, is not the gradient of what SGP solves.

    `stop=EarlyStopping(…)` ends the loop on a validation metric and returns the best params and hypers. `trace` says
    whether the history holds the hypers and hyper-gradients of every outer step (None: if they are not too many).
    `run` is the engine; further options go to it (`progress`, …).
    """
    whole("outer_steps", outer_steps, least=0)
    for name in ("record", "every"):
        if name in options:
            raise InvalidInput(name, options[name], "nothing: solve records every outer step in its history")
    if stop is not None and options.get("faults") is not None:
        raise InvalidInput("stop", "early stopping on links that lose messages", "reliable links: clients vote on it")
    if any(getattr(method, "privacy", None) is not None for method in (inner, hypergradient)):
        # Refuses what would undo the privacy of the rest; without outer steps nothing is estimated.
        budget(inner, hypergradient if outer_steps else None, outer_steps, consensus, stop)
    data = jax.tree.map(jnp.asarray, Data(inner_data, outer_data))
    params, hypers = (jax.tree.map(jnp.asarray, tree) for tree in (params, hypers))
    n = network.clients
    check(problem, params, hypers, data, n)
    check_network(hypergradient, network)
    rule, agreement = None, 0
    if stop is not None:
        data = stop.checked(params, hypers, data, n)
        rule, agreement = replace(stop, data=None), network.flood_rounds()
    tree = _program(problem, inner, hypergradient, outer, outer_steps, restart, consensus, rule, agreement)
    # On links that lose messages part of what an estimator remembers would still be under way.
    memory = getattr(hypergradient, "memory", None) if options.get("faults") is None else None
    start = _State(
        first=params,
        params=params,
        hyper=hypers,
        value=jax.tree.map(jnp.zeros_like, hypers),
        cost=jnp.zeros(n),
        optimizer=jax.vmap(outer.init)(hypers),
        links=None if hypergradient.declares.needs == "any" else known_links(network),
        memory=jax.vmap(memory)(params, hypers) if callable(memory) else None,
        shared=None if consensus is None else consensus.start(hypers, n),
        watch=None if stop is None else Watch.start(params, hypers, n),
    )
    if trace is None:
        trace = (outer_steps + 1) * sum(leaf.size for leaf in jax.tree.leaves(hypers)) <= TRACED
    record = _record_all if trace else _record
    outcome = run(tree, network, start, data, key, record={"start": record, "outer": record}, **options)
    found: _State = outcome.states
    history = _history(tree, start, data, outcome, trace, n)
    if found.watch is not None:
        best, at, step = found.watch.params, found.watch.hyper, int(found.watch.best_step[0])
    else:
        best, at, step = found.params, found.hyper, outer_steps
    return Solution(
        best,
        at,
        step,
        history,
        outcome.rounds,
        outcome.floats,
        outcome.hessian_products,
        outcome.jacobian_products,
        outcome.gradients,
        outcome.step,
    )


def _history(tree: Sequence, start: _State, data: Data, outcome: Outcome, trace: bool, clients: int) -> History:
    """The records of a run of `tree`, put together."""
    first = outcome.history["start"]
    later = outcome.history.get("outer", jax.tree.map(lambda row: row[:0], first))
    everything = jax.tree.map(lambda *parts: jnp.concatenate(parts), first, later)
    (costs, watched, _), hypers, _ = everything if trace else (everything, None, None)
    (_, _, norms), _, gradients = later if trace else (later, None, None)
    begun, loop = tree.nodes
    (step,) = children(loop)
    surveyed = survey(begun, one_client(start), one_client(data), clients)
    taken = spent(surveyed, step, (outcome.rounds, outcome.floats), len(norms))
    return History(
        outer_costs=costs,
        metrics=None if watched is None else watched[0],
        mean_metric=None if watched is None else watched[1][:, 0],
        norms=norms,
        hypers=hypers,
        hypergradients=gradients if len(norms) else None,
        rounds=None if taken is None else np.asarray(taken[:, 0]),
        floats=None if taken is None else np.asarray(taken[:, 1]),
    )
