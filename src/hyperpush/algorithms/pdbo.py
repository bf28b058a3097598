"""Bilevel optimization in nested loops: inner solve, hypergradient, step of the hypers, and again."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import PyTree

from hyperpush.algorithms.base import LOOP, Algorithm, BilevelState
from hyperpush.algorithms.consensus import OuterConsensus
from hyperpush.algorithms.stopping import EarlyStopping, Watch
from hyperpush.checks import check_boolean, check_integer
from hyperpush.errors import InvalidInput
from hyperpush.hypergradients.base import HypergradientEstimator, HypergradientState
from hyperpush.inner.base import InnerSolver, InnerState, LinkEstimates
from hyperpush.method import Method, MethodInfo
from hyperpush.networks import Network
from hyperpush.optimizers import Optimizer, as_transformation
from hyperpush.problem import Problem
from hyperpush.programs import Context, Exchange, Inbox, Local, Node, Repeat, Scope, Sequence
from hyperpush.status import Status


class _State(eqx.Module):
    first: PyTree  # where every inner solve starts from, unless it continues
    params: PyTree
    hyper: PyTree
    hypergradient: PyTree  # the last one
    optimizer: optax.OptState
    links: LinkEstimates | None  # what is known of the links, for estimators that reverse them
    memory: PyTree  # the estimator's, from one outer step to the next
    shared: Any  # the client's part of the consensus (`Shared`); None without
    watch: Watch | None  # of the metric; None without early stopping


class NestedLoops(Algorithm):
    """What PDBO, CDBO and CDBOLocal share: all but whether the clients' hypers agree."""

    inner: InnerSolver
    hypergradient: HypergradientEstimator
    outer: Optimizer | optax.GradientTransformation
    steps: int = eqx.field(static=True)
    restart: bool = eqx.field(static=True, default=True)
    stop: EarlyStopping | None = None
    # An estimator's memory is off where messages get lost: part of what it remembers would still be under way.
    remember: bool = eqx.field(static=True, default=True)

    def __check_init__(self):
        name = type(self).__name__
        check_integer(f"{name}.steps", self.steps, minimum=0)
        check_boolean(f"{name}.restart", self.restart)
        as_transformation(f"{name}.outer", self.outer)
        self._check_pair()

    def _check_pair(self) -> None:
        """Refuse a solver and an estimator that together lower nobody's cost."""
        name, target = type(self).__name__, self.hypergradient.info.target
        alone = self.inner.info.network == "none"
        if target == "local" and not alone:
            given = f"{type(self.hypergradient).__name__} after {type(self.inner).__name__}"
            allowed = "an estimator of everybody's cost such as HGP, or inner=LocalSGD(…): the own inner problem's "
            raise InvalidInput(f"{name}.hypergradient", given, allowed + "derivative is not that of the shared one")
        if target in ("global", "client") and alone:
            given = f"{type(self.hypergradient).__name__} after {type(self.inner).__name__}"
            allowed = "LocalGradient(): without a shared inner problem there is no derivative of its solution"
            raise InvalidInput(f"{name}.hypergradient", given, allowed)
        if self.hypergradient.trains and not self.restart:
            allowed = f"True: {type(self.hypergradient).__name__} differentiates training from the start"
            raise InvalidInput(f"{name}.restart", False, allowed)

    @property
    def consensus(self) -> OuterConsensus | None:
        """How hypers come to agree; None if they do not."""
        return None

    def status(self, states: Any) -> Status:
        return Status() if self.stop is None else Status(reason="early-stopping")

    def parts(self) -> Iterator[Method]:
        yield self.inner
        yield self.hypergradient

    def on(self, network: Network, faults: Any = None) -> "NestedLoops":
        if self.stop is not None and faults is not None:
            given = "early stopping on links that lose messages"
            raise InvalidInput(f"{type(self).__name__}.stop", given, "reliable links, as clients vote on it; or None")
        stop = None if self.stop is None else replace(self.stop, agreement=network.flood_rounds())
        return replace(self, stop=stop, remember=self.remember and faults is None)

    def check_task(self, task: Any) -> None:
        super().check_task(task)
        for part in self.parts():
            part.check_task(task)
        if self.stop is not None:
            self.stop.check_task(f"{type(self).__name__}.stop", task)

    def program(self, problem: Problem) -> Node:
        outer, consensus, stop = as_transformation("outer", self.outer), self.consensus, self.stop
        estimator = self.hypergradient

        def enter(state: BilevelState, ctx: Context) -> _State:
            memory = estimator.memory(state.params, state.hyper) if self.remember else None
            return _State(
                first=state.params,
                params=state.params,
                hyper=state.hyper,
                hypergradient=jax.tree.map(jnp.zeros_like, state.hyper),
                optimizer=outer.init(state.hyper),
                links=state.links,
                memory=memory,
                shared=None if consensus is None else consensus.start(state.hyper),
                watch=None if stop is None else Watch.start(state.params, state.hyper),
            )

        def leave(before: BilevelState, state: _State, ctx: Context) -> BilevelState:
            if state.watch is None:
                return replace(before, params=state.params, hyper=state.hyper, links=state.links)
            watch = state.watch
            return replace(before, params=watch.params, hyper=watch.hyper, links=state.links, best_step=watch.best_step)

        def start_inner(state: _State, ctx: Context) -> InnerState:
            return InnerState(state.first if self.restart else state.params, state.hyper)

        def end_inner(state: _State, trained: InnerState, ctx: Context) -> _State:
            # What the solver saw of the links matters only to an estimator that asks for it.
            links = state.links if state.links is None or trained.links is None else trained.links
            return replace(state, params=trained.params, links=links)

        def start_estimate(state: _State, ctx: Context) -> HypergradientState:
            zeros = jax.tree.map(jnp.zeros_like, state.hyper)
            params = state.first if estimator.trains else state.params
            return HypergradientState(params, state.hyper, zeros, state.links, state.memory)

        def end_estimate(state: _State, found: HypergradientState, ctx: Context) -> _State:
            return replace(state, hypergradient=found.value, memory=found.memory)

        def improve(state: _State, ctx: Context) -> _State:
            updates, optimizer = outer.update(state.hypergradient, state.optimizer, state.hyper)
            return replace(state, hyper=optax.apply_updates(state.hyper, updates), optimizer=optimizer)

        solve = Scope(self.inner.program(problem), start_inner, end_inner)
        estimate = Scope(estimator.program(problem), start_estimate, end_estimate)
        move = Local(improve) if consensus is None else self._move_together(consensus, outer)
        until = None
        if stop is not None:
            solve = Sequence(solve, stop.program(problem))
            until = lambda state, ctx: stop.ended(state.watch)  # noqa: E731
        body = Sequence(
            Repeat(solve, 1, name="start"), Repeat(Sequence(estimate, move, solve), self.steps, until, name=LOOP)
        )
        return Scope(body, enter, leave)

    def _move_together(self, consensus: OuterConsensus, outer: optax.GradientTransformation) -> Node:
        # Estimates of d_{λ_i} F̄ add up to the derivative by a common λ, those of the own cost average to it.
        adds_up = self.hypergradient.info.target == "global"

        def improve(state: _State, ctx: Context) -> _State:
            gradient = jax.tree.map(lambda v: v * ctx.clients if adds_up else v, state.hypergradient)
            shared, gradient = consensus.aim(state.shared, gradient)
            updates, optimizer = outer.update(gradient, state.optimizer, state.hyper)
            return replace(state, shared=consensus.move(shared, updates), optimizer=optimizer)

        def receive(state: _State, inbox: Inbox, ctx: Context) -> _State:
            shared = consensus.receive(state.shared, inbox)
            return replace(state, shared=shared, hyper=shared.hyper)

        push = Exchange(lambda state, ctx: state.shared.message, receive, conserved=True)
        return Sequence(Local(improve), Repeat(push, consensus.pushes, name="consensus"))


class PDBO(NestedLoops):
    """Personalized decentralized bilevel optimization: everybody tunes hypers of its own for everybody's good.

    Before every step the inner problem is solved; then client i moves its own hypers along its hypergradient:

        x ≈ x*(λ);   λ_i ← λ_i + update(d F̄ / dλ_i)

    Terashita and Hara, arXiv:2210.02129. **Use it** where hypers are personal and an inner solve is affordable.
    **Avoid it** if all have to agree on one hyper: take `CDBO`.

    Args:
        inner: The inner solver, such as `hp.SGP(steps=600, step_size=0.1)`.
        hypergradient: The estimator, such as `hp.HGP(steps=20, pushes=10, step_size=0.2)`.
        outer: What moves the hypers: `hp.optimizer("adam", learning_rate=0.1)`, or an Optax transformation. Keep an
            Optax object between calls: a new one compiles anew.
        steps: Steps of the hypers. With 0 only the inner problem is solved.
        restart: Train from the start before every step (True), or continue from where training stands.
        stop: `hp.EarlyStopping(…)` ends the loop on a metric and returns the best step; None takes all steps.
        remember: Let the estimator continue from what it found in the step before, if it can. Off where messages get
            lost: part of what it remembers would still be under way.

    Raises:
        InvalidInput: An option is out of range, or the pair of solver and estimator lowers nobody's cost.
    """

    info: ClassVar[MethodInfo] = MethodInfo(
        network="any",
        target="global",
        sends="what the inner solver and the estimator send",
        paper="Terashita and Hara, arXiv:2210.02129",
        example={
            "inner": {"name": "SGP", "steps": 20, "step_size": 0.1},
            "hypergradient": {"name": "HGP", "steps": 5, "pushes": 3, "step_size": 0.1},
            "outer": {"name": "sgd", "learning_rate": 0.1},
            "steps": 2,
        },
    )


class CDBO(NestedLoops):
    """Consensus bilevel optimization: all clients agree on one hyper that lowers everybody's cost.

    As `PDBO`, and after each step the hypers are pushed `pushes` times so that they agree:

        tracked:      y_i ← y_i + g_i − (g_i before);  z ← P(z + ω·update(y/ω)),  ω ← Pω,  y ← Py,  λ = z/ω
        not tracked:  z ← P(z + update(g)),  ω ← Pω,  λ = z/ω

    where the mean of g_i is dF̄/dλ for a common λ. Naming after "Personalized decentralized bilevel optimization over
    stochastic and directed networks"; tracking is Push-DIGing (Nedić, Olshevsky, Shi 2017). The task needs
    `common=True`.

    Args:
        inner: The inner solver.
        hypergradient: The estimator.
        outer: What moves the hyper, as in `PDBO`.
        steps: Steps of the hyper.
        restart: Train from the start before every step, or continue.
        stop: Early stopping, as in `PDBO`.
        pushes: Rounds of push-sum per step. More let the clients' hypers agree better.
        tracked: Whether clients track the mean hypergradient. Without it half is sent, but a constant step size
            leaves an error of its order between unlike clients, and Adam ends elsewhere.
    """

    info: ClassVar[MethodInfo] = MethodInfo(
        network="any",
        target="global",
        sends="what the inner solver and the estimator send, and the hypers",
        paper="Personalized decentralized bilevel optimization over stochastic and directed networks",
        fixed_point="x_G",
        example=PDBO.info.example,
    )

    pushes: int = eqx.field(static=True, default=1)
    tracked: bool = eqx.field(static=True, default=True)

    def __check_init__(self):
        name = type(self).__name__
        check_integer(f"{name}.pushes", self.pushes, minimum=1)
        check_boolean(f"{name}.tracked", self.tracked)

    @property
    def consensus(self) -> OuterConsensus:
        return OuterConsensus(self.pushes, self.tracked)


class CDBOLocal(CDBO):
    """CDBO whose inner problems are everybody's own: one hyper that is best on average for clients that train alone.

    As `CDBO`, with `inner=hp.LocalSGD(…)` and `hypergradient=hp.hypergradients.LocalGradient()`: nothing of the inner
    problem is sent.
    """

    info: ClassVar[MethodInfo] = MethodInfo(
        network="any",
        target="local",
        sends="the hypers",
        paper="Personalized decentralized bilevel optimization over stochastic and directed networks",
        fixed_point="x_L",
        example={
            "inner": {"name": "LocalSGD", "steps": 20, "step_size": 0.1},
            "hypergradient": {"name": "LocalGradient"},
            "outer": {"name": "sgd", "learning_rate": 0.1},
            "steps": 2,
        },
    )

    def __check_init__(self):
        if self.inner.info.network != "none":
            raise InvalidInput("CDBOLocal.inner", type(self.inner).__name__, "LocalSGD(…): everybody trains alone")
