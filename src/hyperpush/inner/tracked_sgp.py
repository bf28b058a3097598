"""Tracked stochastic gradient push: gradient tracking over push-sum, which solves the inner problem without a tree."""

from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Bool, Float, PyTree

from hyperpush.base.checks import check_integer, check_positive
from hyperpush.base.errors import InvalidInput
from hyperpush.base.numbers import Number, as_number
from hyperpush.base.status import Reason
from hyperpush.data.batches import full_batch
from hyperpush.inner.base import InnerSolver, InnerState
from hyperpush.methods.base import MethodInfo
from hyperpush.programs import Context, Exchange, Inbox, Local, Node, Repeat, Scope, Sequence
from hyperpush.programs.report import LARGEST, Report
from hyperpush.solving.judgment import Judgment
from hyperpush.solving.mixing import Round, fast_rounds, pushes_on_lossy_links
from hyperpush.solving.secants import Secants
from hyperpush.solving.settings import largest_curvature, learn_settings, norm
from hyperpush.solving.tracked import (
    CAUTION,
    CHECK,
    Tracked,
    TrackedMemory,
    repeat_pushes,
    repeat_until_judged,
    send,
    take,
)
from hyperpush.task.problem import Problem

KEPT = 10  # changes that accelerate a step if averages are nearly exact; with plain pushes more than 1 seldom helps
FORGET = 0.8  # factor per step by which earlier curvatures lose weight: costs are not quadratic


class PushPlan(NamedTuple):
    """The communication rounds of one step of `TrackedSGP` on a network.

    Args:
        pushes: Number of rounds per step; None lets clients determine the number.
        mixing: The numbers a, b and c of each round (see `TrackedSGP`); None takes plain rounds of push-sum.
        votes: True if clients vote on ending.
    """

    pushes: int | None = None
    mixing: tuple[Round, ...] | None = None
    votes: bool = True


class _State(Tracked):
    """A client's state during training."""

    start: PyTree  # the params at the start, for their structure
    hyper: PyTree
    longest: Float[Array, ""]  # largest ‖q‖ of all steps so far
    before: PyTree  # the message of the previous round; None if rounds are plain pushes

    @property
    def params(self) -> PyTree:
        return ravel_pytree(self.start)[1](self.q)


class TrackedSGP(InnerSolver):
    """Tracked gradient push: solves the inner problem over push-sum, without a tree and without settings to choose.

    Each client keeps params q, a push-sum weight ω and a tracker y of the mean gradient. The gradients are
    g_i = ∇f_i(p_i), and y starts at g(p). With the push-sum weights P of the links, a step is (after Push-DIGing:
    Nedić, Olshevsky and Shi, arXiv:1607.03218)

        p⁺ = q + Δ,  z ← P(z + ωΔ),  ω ← Pω,  y ← P(y + g(p⁺) − g(p)),  q = z/ω

    At the only fixed point the mean gradient is zero and all clients agree, for any displacements Δ. The method takes
    gradient steps along y/ω. Their length is the inverse of the clients' mean largest curvature, and the last changes
    of q and y/ω accelerate them (Anderson 1965). A client whose y/ω has grown a hundredfold returns to an earlier point
    and takes shorter, plain steps. The sums of all pushed values are conserved, so lost messages do no harm. The
    distance to the solution x* is estimated as

        ‖q − x*‖ ≲ (‖y/ω‖ + rounding)/θ + ‖q − p‖,    θ the smallest curvature along recent changes

    Clients vote every five steps, and end when this estimate is below the tolerance at all clients.

    **Use it** where averages along a tree are not possible or not wanted. Examples are members that distrust each
    other, asynchronous peers, and links that lose messages. `hp.AutomaticInner` uses it there. **Avoid it** where
    members trust each other: `TreeNewton` takes a fraction of the rounds, at any condition number. `TrackedSGP` falls
    short at condition numbers above about 1e3, on some directed rings with many clients and on some small neural
    networks (MLPs). The status says so. The method does not detect directions in which all gradients are zero.

    Departures from Push-DIGing:
        1. A step has several rounds. On links that change, clients determine the number of rounds by a few rounds of
           scalars. On fixed links without losses, rounds are v ← a·Pv + b·v + c·(v before). With suitable numbers a, b
           and c the rounds of a step give the average, or nearly so. A directed ring takes n − 1 rounds, where plain
           pushes take about n².
        2. Steps are accelerated, and clients can return to an earlier point, as in `TrackedHGP`.
        3. In `hp.solve` each outer step continues from the state and the settings of the previous one.

    Args:
        rounds: Largest number of rounds of messages, at least 1. Votes and the search for settings are not counted.
            The status says if the limit is reached. Where messages get lost, clients cannot vote and take all rounds.
        tolerance: The largest accepted distance to the solution, relative to it, above 0. None: 1e-6 in float64, 1e-4
            in float32.
        batch_size: None: all examples in every step. Mini-batches are refused; `SGP` takes them.
        plan: Rounds of a step, found from the network. Leave it None.

    Raises:
        InvalidInput: An option is out of range; the message names it and what is allowed.

    Example:
        The mean of 1, 2 and 6 minimizes the mean inner cost.

        >>> import jax.numpy as jnp
        >>> import hyperpush as hp
        >>> task = hp.Task(
        ...     inner=lambda x, hyper, a: (x - a) ** 2 / 2, outer=lambda x, hyper, b: (x - b) ** 2,
        ...     params=0.0, hypers=0.0, train=jnp.array([[1.0], [2.0], [6.0]]), validation=jnp.zeros((3, 1)),
        ... )
        >>> found = hp.train(task, hp.TrackedSGP(), hp.networks.DirectedRing(3), key=0)
        >>> print(found.params.round(3), found.status)
        [3. 3. 3.] converged (tolerance)
    """

    info: ClassVar[MethodInfo] = MethodInfo(
        network="any",
        target="inner",
        sends="two vectors of the size of the params, and three numbers, per round",
        paper="here; after Nedić, Olshevsky and Shi, Achieving geometric convergence over time-varying graphs",
        lossy=True,
        example={"rounds": 400},
    )

    rounds: int = eqx.field(static=True, default=5000)
    tolerance: Number | None = eqx.field(converter=as_number, default=None)
    batch_size: int | None = eqx.field(static=True, default=None)
    plan: PushPlan | None = eqx.field(static=True, default=None, kw_only=True)

    def __check_init__(self):
        check_integer("TrackedSGP.rounds", self.rounds, minimum=1)
        check_positive("TrackedSGP.tolerance", self.tolerance, optional=True)
        if self.batch_size is not None:
            allowed = "None: tracked gradients gain nothing from mini-batches; SGP(…, batch_size=…) takes them"
            raise InvalidInput("TrackedSGP.batch_size", self.batch_size, allowed)

    @property
    def solves(self) -> bool:
        return True

    def check(self, task: Any, network: Any = None) -> None:
        super().check(task, network)
        if task.privacy is not None:
            allowed = "SGP(…): noise of tracked gradients adds up from step to step"
            raise InvalidInput("method", "TrackedSGP on a private task", allowed)

    def bind(self, network: Any, engine: Any = None, task: Any = None) -> "TrackedSGP":
        if engine is not None and engine.lossy is not None:
            return replace(self, plan=PushPlan(pushes_on_lossy_links(network), votes=False))
        mixing = fast_rounds(network, self.rounds)
        return replace(self, plan=PushPlan(None if mixing is None else len(mixing), mixing))

    @property
    def _plan(self) -> PushPlan:
        return PushPlan() if self.plan is None else self.plan

    def memory(self, params: PyTree, hyper: PyTree) -> TrackedMemory:
        return TrackedMemory.none(ravel_pytree(params)[0])

    def program(self, problem: Problem) -> Node:
        def enter(state: InnerState, ctx: Context) -> _State:
            return self._start(problem, state, ctx)

        def descend(state: _State, ctx: Context) -> _State:
            secants, change = state.displacement(None, accelerates=True)
            change = jnp.where(state.count > 0, change, 0)  # clients share a direction only after mixing
            aim = state.q + change
            after = state.moved(change, aim, _gradient(problem, state.start, state.hyper, aim, ctx), secants)
            return replace(after, longest=jnp.maximum(state.longest, norm(aim)))

        def judge(state: _State, ctx: Context) -> _State:
            return self._judge(state)

        def leave(before: InnerState, state: _State, ctx: Context) -> InnerState:
            return _finish(before, state)

        def has_ended(state: _State, ctx: Context) -> Bool[Array, ""]:
            assert state.judgment is not None
            return state.judgment.ended | ((state.count + CHECK) * state.pushes > self.rounds)

        body, steps = Sequence(Local(descend), self._mix()), max(self.rounds // (self._plan.pushes or 1), 1)
        if self._plan.votes:
            loop: Node = repeat_until_judged(body, Local(judge), steps, self.loop, has_ended)
        else:
            loop = Sequence(Repeat(body, steps, name=self.loop), Local(judge))
        settings = learn_settings(self._plan.pushes)
        return Scope(Sequence(settings, loop), enter, leave)

    def _mix(self) -> Node:
        """Return the node with all communication rounds of a step."""
        if self._plan.mixing is None:
            return repeat_pushes(self._plan.pushes)
        table = self._plan.mixing

        def receive(state: _State, inbox: Inbox, ctx: Context) -> _State:
            own = send(state, ctx)
            a, b, c = jnp.asarray(table, state.z.dtype)[ctx.round]
            mixed = jax.tree.map(lambda new, now, old: a * new + b * now + c * old, inbox.mix(own), own, state.before)
            return replace(take(state, mixed), before=own)

        return Repeat(Exchange(send, receive, conserved=True), len(table), name="pushes")

    def _start(self, problem: Problem, state: InnerState, ctx: Context) -> _State:
        x = ravel_pytree(state.params)[0]
        known = TrackedMemory.none(x) if state.memory is None else state.memory
        gradient = _gradient(problem, state.params, state.hyper, known.aim, ctx)
        # Trackers continue from their last values: they still sum to the gradients, and stay mixed.
        tracker, q = known.tracker + gradient - known.gradient, known.z / known.mass
        back, examples = ravel_pytree(state.params)[1], full_batch(ctx.data.train)

        def multiply(vector: Float[Array, " d"]) -> Float[Array, " d"]:
            return ravel_pytree(problem.hessian_product(back(q), state.hyper, examples, back(vector)))[0]

        own = largest_curvature(multiply, q, ctx.key)
        own = jnp.maximum(own, jnp.finfo(q.dtype).tiny ** 0.5)  # a flat cost has curvature 0
        begun = _State(
            z=known.z,
            mass=known.mass,
            aim=known.aim,
            gradient=gradient,
            tracker=tracker,
            secants=Secants.start(1 if self._plan.mixing is None else KEPT, q, tracker, known.smallest / CAUTION),
            count=jnp.zeros((), jnp.int32),
            pushes=known.pushes if self._plan.pushes is None else jnp.asarray(self._plan.pushes, jnp.int32),
            curvature=known.expected(own),
            own=own,
            judgment=Judgment.start(jnp.zeros((), q.dtype), gradient, 1.0, curvature_signs=True, memory=FORGET),
            start=state.params,
            hyper=state.hyper,
            longest=norm(q),
            before=None,
        )
        return begun if self._plan.mixing is None else replace(begun, before=send(begun, ctx))

    def _judge(self, state: _State) -> _State:
        """Return the state with an estimate of the distance of q to the solution, and a verdict."""
        assert state.judgment is not None
        assert state.secants is not None
        # Terms that cancel in a client's gradient are about as large as its curvature times q.
        judgment = state.judgment.with_terms(state.slope, state.gradient, state.own * state.q)
        rise, (away, seen) = norm(state.slope), replace(state, judgment=judgment).away()
        scale = jnp.maximum(norm(state.q), jnp.sqrt(jnp.finfo(state.q.dtype).eps) * state.longest)
        error = jnp.minimum(away / jnp.where(scale > 0, scale, 1), LARGEST)
        error = jnp.where(seen, error, jnp.where(rise > 0, LARGEST, 0)).astype(rise.dtype)
        tolerance = self.tolerance
        if tolerance is None:
            tolerance = 1e-6 if rise.dtype == jnp.float64 else 1e-4
        return replace(state, judgment=judgment.conclude(error, rise, state.secants, state.count, tolerance))


def _gradient(problem: Problem, like: PyTree, hyper: PyTree, x: Float[Array, " d"], ctx: Context) -> Array:
    """Return a client's gradient at x, a vector with the structure of `like`."""
    back = ravel_pytree(like)[1]
    return ravel_pytree(problem.inner_gradient(back(x), hyper, full_batch(ctx.data.train)))[0]


def _finish(before: InnerState, state: _State) -> InnerState:
    assert state.judgment is not None
    assert state.secants is not None
    judgment = state.judgment
    ill_posed = judgment.reason == Reason.ILL_POSED
    report = Report.of(judgment.reason, jnp.where(ill_posed, -1, judgment.error))
    memory = None if before.memory is None else state.remember(state.gradient, state.secants.remembered)
    return InnerState(state.params, before.hyper, before.links, report, memory)
