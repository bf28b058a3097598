"""Conjugate gradients on exact averages along a tree, with an estimate of the error of their result."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Bool, Float, Int, PyTree

from hyperpush.base.checks import check_integer, check_positive
from hyperpush.base.errors import InvalidInput
from hyperpush.base.numbers import Number, as_number
from hyperpush.base.status import EXACT, NEAR, Reason
from hyperpush.hypergradients.base import HypergradientState, outer_gradient_shares
from hyperpush.hypergradients.judging import (
    begin_stage,
    compare,
    end_step,
    step_to_solution,
    take_center,
    take_gradient,
)
from hyperpush.hypergradients.systems import SystemSolver, default_tolerance, norm_of_jacobian
from hyperpush.hypergradients.tree_state import (
    CAUTION,
    CENTER,
    DIRECTION,
    ENDED,
    FIRST,
    GIVEN,
    JUDGED,
    NEWTON,
    RESIDUAL,
    RUNNING,
    SECOND,
    Judged,
    Probe,
    TreeMemory,
    TreeState,
    message,
    multiply,
    relative_error,
    smaller,
)
from hyperpush.methods.base import MethodInfo
from hyperpush.programs import Average, Context, Local, Node, Repeat, Scope, Sequence
from hyperpush.programs.report import Report
from hyperpush.solving.common import ROUNDING, choose, probe_of
from hyperpush.solving.descent import Descent
from hyperpush.solving.settings import norm
from hyperpush.task.problem import Problem

LITTLE_PROGRESS = 0.3  # if a cycle leaves more than this share of the residual, rounding prevents progress
SHRUNK = 1e-3  # share of the probe's residual, divided by the condition number, at which its Ritz values have settled
# Progress that the root reports: probe finished, stage finished, or all finished.
PROBED, DONE, OVER = 1, 2, 3
HIDDEN = 1e-3  # with a residual below this share of the probe's part along a direction, no direction is still hidden


class TreeCG(SystemSolver):
    """Conjugate gradients on exact averages along a tree, with an estimate of the error of their result.

    The result of client i, and the linear system for x, are

        v_i = (1/n) ∂_λ F_i − B_i x,    mean(H_k) x = mean((1/n) ∂_x F_k)

    with H_k = ∂²_xx f_k, B_i = ∂²_λx f_i, inner costs f and outer costs F. All means are exact: they are summed along a
    spanning tree of the network and sent back. On average each client sends at most two vectors per mean. So plain
    conjugate gradients apply (Hestenes and Stiefel 1952). Their Ritz values are upper bounds of the smallest eigenvalue
    θ of the mean Hessian, and approach it. A second, random right-hand side gives further Ritz values. The relative
    error of every v_i is then about at most

        max_i ‖B_i‖/‖v_i‖ · (‖r‖ + rounding)/θ,    r the residual,

    plus the rounding of the two terms of v_i, which matters if they cancel. The method ends when this bound is below
    the tolerance, or below twice the tolerance for a recomputed residual. Otherwise the status gives the reason: the
    limit of steps, a singular or indefinite Hessian (`"ill-posed"`), or rounding (`"inaccurate"`). Rounding prevents
    the tolerance at a large condition number, or if the terms cancel. Within an algorithm v_i may vanish at the end.
    So if the terms cancel beyond half of the digits there, the error is relative to the terms.

    **Use it** wherever links repeat and members trust each other: it is the default (`hp.Automatic`). **Avoid it** with
    mini-batches, on private tasks, and among members that distrust each other. A parent in the tree sees its children's
    vectors and can falsify a sum. Use `TrackedHGP` there.

    Args:
        steps: Limit of iterations, at least 1. Each takes one or two products. The status says if the limit is reached.
            About √κ·ln(2/ε)/2 steps reach an error ε at condition number κ.
        tolerance: Largest accepted relative error of any client's result, above 0. None: 1e-5 in float64, 1e-3 in
            float32. The true error is usually at most a tenth of it.
        damping: Added to the diagonal of the mean Hessian, 0 or more. Above 0 it makes a singular Hessian positive
            definite, and biases the result.
        singular: Treatment of a singular Hessian. `"refuse"` marks the result as not converged. `"minimum-norm"`
            leaves out directions without curvature; the result is not converged if the outer gradient has a part
            there. `"damping"` needs a `damping` above 0.
        common: True if hypers are common; then params are judged by the mean of all v_i. Set automatically for a task
            with `common=True`.

    Raises:
        InvalidInput: An option is out of range; the message names it and what is allowed.

    Example:
        >>> import hyperpush as hp
        >>> task, network = hp.tasks.quadratic(5, seed=0), hp.networks.RandomDirected(5)
        >>> trained = hp.train(task, hp.SGP(steps=200, step_size=0.1), network, key=0).task
        >>> exact = hp.hypergradient(trained, hp.hypergradients.Dense(), network, key=0).value
        >>> found = hp.hypergradient(trained, hp.TreeCG(), network, key=0)
        >>> found.status.converged, bool(abs(found.value - exact).max() < 1e-3)
        (True, True)
    """

    exact: ClassVar[bool] = True
    judges: ClassVar[bool] = True
    info: ClassVar[MethodInfo] = MethodInfo(
        network="any",
        target="global",
        sends="at most two vectors of the size of the params per average, and three averages more than products. "
        "Once 258 numbers, and some vectors more where these do not decide whether the params solve the inner problem",
        paper="here; conjugate gradients: Hestenes and Stiefel 1952",
        note="inner nodes of the tree see their children's vectors",
        lossy=True,
        example={"steps": 50},
    )

    steps: int = eqx.field(static=True, default=2000)
    tolerance: Number | None = eqx.field(converter=as_number, default=None)
    damping: Number = eqx.field(converter=as_number, default=0.0)

    common: bool = eqx.field(static=True, default=False, kw_only=True)

    def __check_init__(self):
        check_integer("TreeCG.steps", self.steps, minimum=1)
        check_positive("TreeCG.tolerance", self.tolerance, optional=True)

    def bind(self, network: Any, engine: Any = None, task: Any = None) -> "TreeCG":
        if engine is not None and engine.no_tree:
            allowed = "TrackedHGP(…) or Automatic(), which need no tree"
            raise InvalidInput("method", f"TreeCG among {engine.no_tree}", allowed)
        return replace(self, common=True) if task is not None and task.common else self

    def memory(self, params: PyTree, hyper: PyTree) -> TreeMemory | None:
        if self.ignores_flat:  # only a start from zero leads to the solution of least norm
            return None
        vector = ravel_pytree(params)[0]
        return TreeMemory(jnp.zeros_like(vector), jnp.zeros((), vector.dtype))

    def program(self, problem: Problem) -> Node:
        return self.program_on(problem, "tree")

    def program_on(self, problem: Problem, by: Literal["tree", "exact"]) -> Node:
        """Return the program with averages along a tree, or exact ones if one machine has all clients."""
        return self._program(problem, by, judges=True)

    def estimate_on(self, problem: Problem, by: Literal["tree", "exact"]) -> Node:
        """Return a program that leaves the params unjudged. No loop encloses its loops, so they can be recorded."""
        return self._program(problem, by, judges=False)

    def _program(self, problem: Problem, by: Literal["tree", "exact"], judges: bool) -> Node:
        def start(state: HypergradientState, ctx: Context) -> TreeState:
            return self._start(problem, state, ctx)

        body = self._body(problem, by)
        rest = self._stages(problem, body, FIRST, by, last=SECOND) if judges else self._stage(problem, body, FIRST)
        return Scope(Sequence(*self._probing(body), rest), start, _finish)

    def distance_on(self, problem: Problem, by: Literal["tree", "exact"], probed: bool = False) -> Node:
        """Return a program that only measures how far params are from solved.

        With `probed`, a random right-hand side first looks for directions that are orthogonal to the inner gradient.
        Negative curvature makes params ill-posed. At a direction without curvature, which a minimum may have, the
        program ends with its limit of steps.
        """

        def start(state: HypergradientState, ctx: Context) -> TreeState:
            vector, direct = ravel_pytree(state.params)[0], optax.tree.zeros_like(state.hyper)
            begun = self._state(state, jnp.zeros_like(vector), direct, jnp.zeros((), vector.dtype))
            begun = replace(begun, measures=True)
            if probed:
                return replace(begun, probe=self._start_probe(vector, ctx))
            return replace(begun, judged=Judged.start(begun.value, begun.memory, begun.error))

        body = self._body(problem, by)
        stages = self._stages(problem, body, FIRST if probed else CENTER, by, last=NEWTON)
        return Scope(Sequence(*self._probing(body), stages) if probed else stages, start, _finish)

    def _probing(self, body: Node) -> tuple[Node, Node]:
        """Return the loop that ends with the probe or with the estimate, and the step that then removes the probe."""

        def drop_probe(state: TreeState, ctx: Context) -> TreeState:
            return replace(state, probe=None, judged=Judged.start(state.value, state.memory, state.error))

        probing = Repeat(body, self.steps, until=_is_past(PROBED), name="TreeCG", common=True)
        return probing, Local(drop_probe)

    def _body(self, problem: Problem, by: Literal["tree", "exact"]) -> Node:
        def work(state: TreeState, ctx: Context) -> TreeState:
            return multiply(problem, state, ctx)

        def advance(state: TreeState, means: tuple[Any, ...], mass: Any, ctx: Context) -> TreeState:
            return self._advance(state, means, ctx.clients)

        return Sequence(Local(work), Average(message, advance, rounds=1, by=by, ends=_how_far))

    def _stage(self, problem: Problem, body: Node, first: int) -> Node:
        """Return the node of one stage; `begin_stage` counts the stages from `first`."""

        def begin(state: TreeState, ctx: Context) -> TreeState:
            return begin_stage(problem, state, ctx, first, self.ignores_flat)

        def remaining(state: TreeState, ctx: Context) -> Int[Array, ""]:
            return jnp.where(state.ended >= DONE, 0, self.steps)

        rest = Repeat(body, self.steps, until=_is_past(DONE), times=remaining, name="TreeCG without probe", common=True)
        return Sequence(Local(begin), rest)

    def _stages(self, problem: Problem, body: Node, first: int, by: Literal["tree", "exact"], last: int) -> Node:
        """Return the node of the stages from `first` to `last`: an estimate or a probe, then the params' judgment."""
        stage, count = self._stage(problem, body, first), last - first + 1
        stages = Repeat(stage, count, until=_is_past(OVER), name="TreeCG stages", common=True)
        if not self.common or last != SECOND:
            return stages
        mean = Average(_difference, _compare_means, rounds=1, by=by)
        return Sequence(stages, Repeat(mean, 1, times=_is_compared, name="TreeCG mean"))

    def _start(self, problem: Problem, state: HypergradientState, ctx: Context) -> TreeState:
        source, direct = outer_gradient_shares(problem, state, ctx)
        begun = self._state(state, ravel_pytree(source)[0], direct, norm_of_jacobian(problem, state, ctx))
        return replace(begun, probe=self._start_probe(begun.x, ctx))

    def _start_probe(self, like: Float[Array, " d"], ctx: Context) -> Probe:
        random = probe_of(like.size, like.dtype, ctx)
        descent = Descent.start(random, self._room(random))
        return Probe(descent, jnp.zeros_like(random), jnp.linalg.norm(random), jnp.ones((), bool))

    def _state(
        self, state: HypergradientState, source: Float[Array, " d"], direct: PyTree, jacobian_norm: Float[Array, ""]
    ) -> TreeState:
        zero, none, integer = jnp.zeros((), source.dtype), jnp.zeros_like(source), jnp.zeros((), jnp.int32)
        known = TreeMemory(none, zero) if state.memory is None else state.memory
        return TreeState(
            params=state.params,
            hyper=state.hyper,
            source=source,
            direct=direct,
            jacobian_norm=jacobian_norm,
            x=known.x,
            along_x=optax.tree.zeros_like(direct),
            descent=Descent.start(none, self._room(none)),
            probe=None,
            image=none,
            squared=zero,
            along=optax.tree.zeros_like(direct),
            phase=integer + RESIDUAL,
            stage=integer + FIRST,
            reason=integer + RUNNING,
            count=integer,
            ended=integer,
            certify=jnp.ones((), bool) if state.certify is None else state.certify,
            expected=known.smallest / CAUTION,
            smallest=zero,
            largest=zero,
            drift=zero,
            begin=zero,
            ratio=zero,
            error=zero - 1,
            start=zero if state.start is None else state.start.astype(zero.dtype),
            before=zero if state.size is None else state.size.astype(zero.dtype),
            skip=zero + (EXACT if state.outer is None else jnp.where(state.outer == 0, EXACT, NEAR)),
            judged=None,
            common=self.common,
            alone=state.outer is None,
        )

    def _advance(self, state: TreeState, means: tuple[Any, ...], clients: int) -> TreeState:
        """Return the state after an iteration's averages; all fields but `along_x` change equally at all clients."""
        image, probed, squared, largest, ratios, terms = means
        state = replace(state, count=state.count + 1, ratio=jnp.sqrt(jnp.sqrt(clients * ratios)))
        rounding = jnp.finfo(image.dtype).eps
        at_residual, given = state.phase == RESIDUAL, state.phase == GIVEN
        vector = state.vector
        size = norm(vector)
        spread = jnp.sqrt(squared) * size  # root mean square of ‖H_k vector‖ over the clients
        seen = jnp.where(given, state.largest, jnp.maximum(state.largest, jnp.sqrt(largest)))
        state = replace(state, largest=seen)
        floor = ROUNDING * rounding * state.largest
        if state.probe is not None:
            state = self._advance_probe(state, probed, floor)
        residual = self._check_residual(state, image, 2 * rounding * spread)
        direction = self._step(state, image + self.damping * vector, rounding * spread, floor)
        after = choose(at_residual, residual, direction)
        ended = (after.reason != RUNNING) | (after.count >= self.steps)
        after = replace(after, phase=jnp.where(ended, ENDED, after.phase).astype(jnp.int32))
        return after if state.judged is None else self._judge(state, after, image, squared, terms, floor)

    def _judge(
        self,
        before: TreeState,
        after: TreeState,
        image: Array,
        squared: Array,
        terms: tuple[Array, Array],
        floor: Array,
    ) -> TreeState:
        """Return the state after an iteration of any stage; `after` is the state after an iteration of an estimate."""
        given, stage = before.phase == GIVEN, before.stage
        undamped = replace(before, expected=jnp.where(jnp.asarray(self.damping) > 0, 0, before.expected))
        gradient = take_gradient(undamped, image, squared, terms)
        newton = choose(given, gradient, step_to_solution(undamped, image, floor))
        assert before.judged is not None
        changed, size = (before.judged.size * jnp.sqrt(term) for term in terms)
        decided = compare(after, changed, size)
        if self.common:  # the means are compared, unless the second estimate failed
            decided = choose(after.reason == Reason.TOLERANCE, after, decided)
        second = choose(after.phase == ENDED, decided, after)
        after = choose(stage == SECOND, second, after)
        after = choose(stage == NEWTON, end_step(newton, self.steps), after)
        return choose(stage == CENTER, take_center(before, image), after)

    def _advance_probe(self, state: TreeState, image: Float[Array, " d"], floor: Float[Array, ""]) -> TreeState:
        probe = state.probe
        assert probe is not None
        image = image + self.damping * probe.descent.direction
        descent, _ = probe.descent.advance(image)
        curvature = probe.descent.curvature(image)
        flat = probe.on & (curvature <= floor)
        smallest = descent.ritz.smallest(floor)
        settled, singular = descent.size <= SHRUNK * smallest / descent.ritz.most * probe.first, flat
        if self.ignores_flat:
            # The first product removes the probe's part outside of the Hessian's range, and shrinks parts with little
            # curvature. So the probe continues until rounding hides these parts.
            singular = flat & (curvature < -floor)
            settled = descent.size <= floor / descent.ritz.most * probe.first
        useful = probe.on & ~flat
        on = ~settled & (descent.ritz.count < self._room(image))
        after = choose(useful, replace(probe, descent=descent, on=on), replace(probe, on=probe.on & ~flat))
        known = jnp.where(useful, smaller(state.smallest, smallest), state.smallest)
        if self.ignores_flat:
            begins, size = state.count == 1, jnp.linalg.norm(image)
            first = replace(probe, descent=Descent.start(image, self._room(image)), first=size, on=size > 0)
            after = choose(begins, first, after)
            known, singular = jnp.where(begins, state.smallest, known), singular & ~begins
        named = jnp.where(curvature < -floor, Reason.ILL_POSED, Reason.LIMIT) if state.measures else Reason.ILL_POSED
        reason = jnp.where(singular, named, state.reason).astype(jnp.int32)
        return replace(state, probe=after, smallest=known, reason=reason)

    def _check_residual(self, state: TreeState, residual: Float[Array, " d"], floor: Float[Array, ""]) -> TreeState:
        """Return the state after the residual was recomputed: the end, or the start of another cycle."""
        residual = residual - self.damping * state.x
        size, first = norm(residual), state.begin == 0
        exact = size == 0
        error = relative_error(state, jnp.where(exact, 0, size + floor), state.smallest)
        error = jnp.where(exact & (first | (not state.alone)), 0, error)  # if x = 0, v_i has one term only
        solved = (~first | exact) & (error <= 2 * self._tolerance(residual))
        waits = solved & self._awaits_probe(state)
        hopeless = ~first & ((size > LITTLE_PROGRESS * state.begin) | (size <= 3 * floor))
        reason = jnp.where(solved, Reason.TOLERANCE, jnp.where(hopeless, Reason.INACCURATE, state.reason))
        reason = jnp.where(waits, state.reason, reason)
        return replace(
            state,
            descent=Descent.start(residual / jnp.where(size > 0, size, 1), self._room(residual)),
            begin=jnp.where(waits, state.begin, size),
            drift=jnp.zeros_like(state.drift),
            error=jnp.where(first & ~exact, state.error, error),
            phase=jnp.where(waits, RESIDUAL, DIRECTION).astype(jnp.int32),
            reason=jnp.where(state.reason == RUNNING, reason, state.reason).astype(jnp.int32),
            along_x=state.along,
        )

    def _step(self, state: TreeState, image: Float[Array, " d"], rounding: Float[Array, ""], floor: Any) -> TreeState:
        """Return the state after a step along the direction."""
        descent, length = state.descent.advance(image)
        singular = state.descent.curvature(image) <= floor
        smallest = smaller(state.smallest, descent.ritz.smallest(floor))
        singular = singular | (smallest <= floor)
        drift = jnp.hypot(state.drift, rounding * length)
        error = relative_error(state, state.begin * (descent.size + drift), smallest)
        moved = state.begin * length
        leave = (error <= self._tolerance(image)) | (descent.size <= 2 * drift)
        after = replace(
            state,
            x=state.x + moved * state.descent.direction,
            along_x=jax.tree.map(lambda sum, part: sum + moved * part, state.along_x, state.along),
            descent=descent,
            drift=drift,
            smallest=smallest,
            error=error,
            phase=jnp.where(leave, RESIDUAL, DIRECTION).astype(jnp.int32),
        )
        stop = singular | (state.reason != RUNNING)
        reason = jnp.where(singular & (state.reason == RUNNING), Reason.ILL_POSED, state.reason).astype(jnp.int32)
        return replace(choose(stop, state, after), reason=reason)

    def _awaits_probe(self, state: TreeState) -> Bool[Array, ""]:
        """Return True if the probe may still find the Hessian singular.

        If the outer gradient has parts along few eigenvectors, the system is solved before the other eigenvectors
        appear. About 1/√d of the probe is along any eigenvector, and stays in the residual if the curvature is zero.
        With a residual below a thousandth of that, one random probe in 1,250 still hides a direction. Only the first
        and the last outer step wait for the probe. The other steps start from the previous solution, and waiting would
        cost as much as they save by that.
        """
        if state.probe is None or self.ignores_flat:
            return jnp.zeros((), bool)
        hidden = HIDDEN / jnp.sqrt(state.x.size) * state.probe.first
        unfinished = state.probe.on | (state.probe.descent.ritz.count >= self.steps)
        return unfinished & (state.probe.descent.size > hidden) & state.certify

    def _room(self, like: Array) -> int:
        """Return how many steps of a descent the Ritz values use: more than d, because rounding delays convergence."""
        return min(self.steps, 4 * like.size + 20)

    def _tolerance(self, like: Array) -> Any:
        return default_tolerance(like.dtype) if self.tolerance is None else self.tolerance


def _finish(before: HypergradientState, state: TreeState, ctx: Context) -> HypergradientState:
    judged, alone = state.judged, state.stage == FIRST
    assert judged is not None
    value, memory, error = choose(
        alone, (state.value, state.memory, state.error), (judged.value, judged.memory, judged.error)
    )
    reason = jnp.where(state.reason == RUNNING, Reason.LIMIT, state.reason)
    report = Report.of(reason, jnp.where(reason == Reason.ILL_POSED, -1, error))
    known = jnp.stack([judged.residual, judged.disagreement, judged.moved])
    report = report.judged(*jnp.where(alone, -1, known))
    memory = None if before.memory is None else memory
    terms = None if before.terms is None else norm(state.direct) + norm(state.along_x)
    return replace(before, value=value, memory=memory, report=report, size=_first_size(before, state), terms=terms)


def _first_size(before: HypergradientState, state: TreeState) -> Array | None:
    """Return the size of the first estimate if it passed; estimates of later outer steps are compared with it."""
    judged = state.judged
    if before.size is None or judged is None:
        return None
    passed = (state.stage != FIRST) & (state.reason == Reason.TOLERANCE) & ((judged.moved >= 0) | (not state.common))
    return jnp.where((before.size == 0) & passed, judged.size, before.size)


def _how_far(state: TreeState, ctx: Context) -> Int[Array, ""]:
    """Return the progress of the iterations; an estimate that failed, or without `certify`, ends without judgment."""
    probed = jnp.ones((), bool) if state.probe is None else ~state.probe.on
    done = state.phase == ENDED
    failed = (state.stage == FIRST) & ((state.reason != Reason.TOLERANCE) | ~state.certify)
    over = done & (failed | (state.stage == JUDGED))
    return jnp.select([over, done, probed], [OVER, DONE, PROBED], 0).astype(jnp.int32)


def _is_past(place: int) -> Callable[[TreeState, Context], Bool[Array, ""]]:
    """Return a condition that is true once the root has reported this progress, or more."""
    return lambda state, ctx: state.ended >= place


def _is_compared(state: TreeState, ctx: Context) -> Int[Array, ""]:
    """Return 1 if a second estimate must be compared, else 0."""
    return ((state.stage == SECOND) & (state.reason == Reason.TOLERANCE)).astype(jnp.int32)


def _difference(state: TreeState, ctx: Context) -> tuple[tuple[PyTree, PyTree], Array]:
    assert state.judged is not None
    return (jax.tree.map(jnp.subtract, state.judged.value, state.value), state.value), jnp.ones(())


def _compare_means(state: TreeState, means: tuple[PyTree, PyTree], mass: Any, ctx: Context) -> TreeState:
    """Return the state judged by the change of the mean v_i from the first to the second estimate."""
    assert state.judged is not None
    smallest = jnp.sqrt(jnp.finfo(state.x.dtype).eps) * state.judged.size  # of terms that cancel out
    return compare(state, norm(means[0]), jnp.maximum(norm(means[1]), smallest))
