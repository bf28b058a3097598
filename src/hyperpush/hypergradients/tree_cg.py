"""Conjugate gradients on exact averages along a tree, which know the error of their result."""

from dataclasses import replace
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Bool, Float, Int, PyTree

from hyperpush.base.checks import check_integer, check_positive
from hyperpush.base.errors import InvalidInput
from hyperpush.base.numbers import Number, as_number
from hyperpush.base.status import Reason
from hyperpush.data.batches import everything
from hyperpush.hypergradients.base import HypergradientState, outer_gradient_shares, subtract_indirect
from hyperpush.hypergradients.newton import append_newton_step
from hyperpush.hypergradients.systems import SystemSolver, default_tolerance, norm_of_jacobian, scale_of
from hyperpush.methods.base import MethodInfo
from hyperpush.programs import Average, Context, Local, Node, Repeat, Scope, Sequence
from hyperpush.programs.decide import decide_at_root, has_ended
from hyperpush.programs.report import LARGEST, Report
from hyperpush.solving.common import ROUNDING, choose, probe_of
from hyperpush.solving.descent import Descent
from hyperpush.solving.settings import norm
from hyperpush.task.problem import Problem

# What a client multiplies and all average in an iteration: the residual at x, or the next direction.
RESIDUAL, DIRECTION, ENDED = range(3)
RUNNING = -1  # no reason to end yet
LITTLE_PROGRESS = 0.3  # a cycle that leaves more than this share of the residual has met rounding
SHRUNK = 1e-3  # of the probe's residual, relative to the condition number: then its Ritz values have settled
HIDDEN = 1e-3  # times the part of a probe along one direction: what is less of its residual hides none
CAUTION = 1.3  # the smallest eigenvalue may have fallen by so much since the outer step before


class Memory(eqx.Module):
    """What a client keeps for the next outer step."""

    x: Float[Array, "*clients d"]
    smallest: Float[Array, "*clients"]  # eigenvalue of the mean Hessian seen so far; 0: none yet


class _Probe(eqx.Module):
    """A second right-hand side, random and common: the directions that the first has no part in are not overlooked."""

    descent: Descent
    image: Float[Array, " d"]  # H_i times its direction
    first: Float[Array, ""]  # size of its residual at the start
    on: Bool[Array, ""]


class _State(eqx.Module):
    params: PyTree
    hyper: PyTree
    source: Float[Array, " d"]  # (1/n)∂_x F_i
    direct: PyTree  # (1/n)∂_λ F_i
    reach: Float[Array, ""]  # ‖B_i‖
    x: Float[Array, " d"]
    along_x: PyTree  # B_i x, summed up on the way
    descent: Descent
    probe: _Probe | None
    image: Float[Array, " d"]  # H_i times what `phase` says, or the source less that for the residual
    squared: Float[Array, ""]  # (‖H_i p‖/‖p‖)² for that p
    along: PyTree  # B_i p
    phase: Int[Array, ""]
    reason: Int[Array, ""]
    count: Int[Array, ""]  # iterations so far
    thorough: Bool[Array, ""]  # whether to wait for the probe
    expected: Float[Array, ""]  # smallest eigenvalue of the mean Hessian, by the outer step before; 0: not known
    smallest: Float[Array, ""]  # the same, as far as it was seen now; 0: not yet
    largest: Float[Array, ""]  # curvature of the clients' Hessians seen so far, in the mean
    drift: Float[Array, ""]  # what rounding may have added to the residual since it was computed anew
    begin: Float[Array, ""]  # size of the residual at the start of a cycle, in which the descent counts
    ratio: Float[Array, ""]  # the relative error of any v_i is at most so many times that of x
    error: Float[Array, ""]  # of v, relative, as estimated
    ended: Bool[Array, ""]  # whether the root has ended the loop


class TreeCG(SystemSolver):
    """Conjugate gradients on exact averages along a tree, with an estimate of the error of their result.

        v_i = (1/n) ∂_λ F_i − B_i x,    mean(H_k) x = mean((1/n) ∂_x F_k)

    All means are exact: they are gathered along a spanning tree of the network and sent back, at most two vectors per
    client on average. So plain conjugate gradients apply (Hestenes and Stiefel 1952). Their Ritz values, and those of a
    second, random right-hand side, bound the smallest eigenvalue θ of the mean Hessian from above, closer and closer.
    The relative error of every v_i is then about at most

        max_i ‖B_i‖/‖v_i‖ · (‖r‖ + rounding)/θ,    r the residual,

    and the method ends where this is below the tolerance, or twice it when the residual is computed anew. Where the
    terms of v_i cancel beyond half of the digits, the error is relative to the terms. It says so where it cannot get
    there: a limit of steps, a singular or indefinite Hessian (`"ill-posed"`), or a condition that rounding does not
    allow (`"inaccurate"`).

    **Use it** wherever links repeat and members trust each other: it is the default (`hp.Automatic`). **Avoid it** with
    mini-batches, on private tasks, and among members that distrust each other: who forwards in the tree sees its
    children's vectors and can falsify a sum. There take `TrackedHGP`.

    Args:
        steps: Iterations at most, at least 1, of one or two products each; at the limit the status says so. About
            √κ·ln(2/ε)/2 reach an error ε at condition number κ.
        tolerance: The largest relative error of any client's result to accept, above 0. None: 1e-5 in float64, 1e-3 in
            float32; the true error is usually ten times smaller or less.
        damping: Added to the diagonal of the mean Hessian, 0 or more. Above 0 it makes a singular Hessian positive
            definite, and biases the result.
        singular: What to do with a singular Hessian. `"refuse"` marks the result as not converged. `"minimum-norm"`
            leaves out directions without curvature; it is not converged if the outer gradient has a part there.
            `"damping"` takes `damping`, which must be above 0 then.

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
    info: ClassVar[MethodInfo] = MethodInfo(
        network="any",
        target="global",
        sends="at most two vectors of the size of the params per average, and at most five averages more than "
        "products; once 258 numbers, and where these leave open whether the params solve the inner problem, some "
        "vectors more",
        paper="here; conjugate gradients: Hestenes and Stiefel 1952",
        note="inner nodes of the tree see their children's vectors",
        lossy=True,
        example={"steps": 50},
    )

    steps: int = eqx.field(static=True, default=2000)
    tolerance: Number | None = eqx.field(converter=as_number, default=None)
    damping: Number = eqx.field(converter=as_number, default=0.0)

    def __check_init__(self):
        check_integer("TreeCG.steps", self.steps, minimum=1)
        check_positive("TreeCG.tolerance", self.tolerance, optional=True)

    def on(self, network: Any, engine: Any = None, task: Any = None) -> "TreeCG":
        if engine is not None and engine.no_tree:
            allowed = "TrackedHGP(…) or Automatic(), which need no tree"
            raise InvalidInput("method", f"TreeCG among {engine.no_tree}", allowed)
        return self

    def memory(self, params: PyTree, hyper: PyTree) -> Memory | None:
        if self.ignores_flat:  # the solution of least norm is found from zero alone
            return None
        vector = ravel_pytree(params)[0]
        return Memory(jnp.zeros_like(vector), jnp.zeros((), vector.dtype))

    def program(self, problem: Problem) -> Node:
        def start(state: HypergradientState, ctx: Context) -> _State:
            return self._start(problem, state, ctx)

        def multiply(state: _State, ctx: Context) -> _State:
            return _multiply(problem, state, ctx)

        def advance(state: _State, means: tuple[Any, ...], mass: Any, ctx: Context) -> _State:
            return self._advance(state, means, ctx.clients)

        def finish(before: HypergradientState, state: _State, ctx: Context) -> HypergradientState:
            x = ravel_pytree(before.params)[1](state.x)
            after = subtract_indirect(problem, before, state.direct, x, ctx)
            reason = jnp.where(state.reason == RUNNING, Reason.LIMIT, state.reason)
            error = jnp.where(reason == Reason.ILL_POSED, -1, state.error)
            memory = before.memory and Memory(state.x, _remembered(state))
            smallest = _positive(_smaller(state.expected, state.smallest))
            return replace(after, memory=memory, report=Report.of(reason, error), smallest=smallest)

        def drop_probe(state: _State, ctx: Context) -> _State:
            return replace(state, probe=None, ended=jnp.zeros_like(state.ended))

        def is_done(state: _State, ctx: Context) -> Bool[Array, ""]:
            return state.phase == ENDED

        def needs_no_probe(state: _State, ctx: Context) -> Bool[Array, ""]:
            assert state.probe is not None
            return (state.phase == ENDED) | ~state.probe.on

        average = Average(_message, advance, rounds=1, by="tree")
        probe, others = decide_at_root(average, needs_no_probe, stays=False), decide_at_root(average, is_done)
        body = Sequence(Local(multiply), probe)
        probing = Repeat(body, self.steps, until=has_ended, name="TreeCG", common=True)
        body = Sequence(Local(multiply), others)
        rest = Repeat(body, self.steps, until=has_ended, name="TreeCG without probe", common=True)
        solve = Scope(Sequence(probing, Local(drop_probe), rest), start, finish)
        return append_newton_step(solve, problem, self, self.steps)

    def _start(self, problem: Problem, state: HypergradientState, ctx: Context) -> _State:
        source, direct = outer_gradient_shares(problem, state, ctx)
        source = ravel_pytree(source)[0]
        zero, none = jnp.zeros((), source.dtype), jnp.zeros_like(source)
        known = Memory(none, zero) if state.memory is None else state.memory
        random = probe_of(source.size, source.dtype, ctx)
        probe = _Probe(Descent.start(random, self.steps), none, jnp.linalg.norm(random), jnp.ones((), bool))
        return _State(
            params=state.params,
            hyper=state.hyper,
            source=source,
            direct=direct,
            reach=norm_of_jacobian(problem, state, ctx),
            x=known.x,
            along_x=optax.tree.zeros_like(direct),
            descent=Descent.start(none, self.steps),
            probe=probe,
            image=none,
            squared=zero,
            along=optax.tree.zeros_like(direct),
            phase=jnp.asarray(RESIDUAL, jnp.int32),
            reason=jnp.asarray(RUNNING, jnp.int32),
            count=jnp.zeros((), jnp.int32),
            thorough=jnp.ones((), bool) if state.thorough is None else state.thorough,
            expected=known.smallest / CAUTION,
            smallest=zero,
            largest=zero,
            drift=zero,
            begin=zero,
            ratio=zero,
            error=zero - 1,
            ended=jnp.zeros((), bool),
        )

    def _advance(self, state: _State, means: tuple[Any, ...], clients: int) -> _State:
        """What every client makes of the averages; but for `along_x` the same at all of them."""
        image, probed, squared, largest, ratios = means
        state = replace(state, count=state.count + 1, ratio=(clients * ratios) ** 0.25)
        rounding = jnp.finfo(image.dtype).eps
        at_residual = state.phase == RESIDUAL
        vector = jnp.where(at_residual, state.x, state.descent.direction)
        size = norm(vector)
        spread = jnp.sqrt(squared) * size  # root mean square of ‖H_k vector‖ over the clients
        state = replace(state, largest=jnp.maximum(state.largest, jnp.sqrt(largest)))
        floor = ROUNDING * rounding * state.largest
        if state.probe is not None:
            state = self._advance_probe(state, probed, floor)
        residual = self._check_residual(state, image, 2 * rounding * spread)
        direction = self._step(state, image + self.damping * vector, rounding * spread, floor)
        after = choose(at_residual, residual, direction)
        ended = (after.reason != RUNNING) | (after.count >= self.steps)
        return replace(after, phase=jnp.where(ended, ENDED, after.phase).astype(jnp.int32))

    def _advance_probe(self, state: _State, image: Float[Array, " d"], floor: Float[Array, ""]) -> _State:
        probe = state.probe
        assert probe is not None
        image = image + self.damping * probe.descent.direction
        descent, _ = probe.descent.advance(image)
        curvature = probe.descent.curvature(image)
        flat = probe.on & (curvature <= floor)
        smallest = descent.ritz.smallest(floor)
        settled, singular = descent.size <= SHRUNK * smallest / descent.ritz.most * probe.first, flat
        if self.ignores_flat:
            # Its part outside the range goes with the first product. That makes parts with little curvature small, so
            # it goes on to where rounding lets them be told from nothing.
            singular = flat & (curvature < -floor)
            settled = descent.size <= floor / descent.ritz.most * probe.first
        useful = probe.on & ~flat
        on = ~settled & (descent.ritz.count < self.steps)
        after = choose(useful, replace(probe, descent=descent, on=on), replace(probe, on=probe.on & ~flat))
        known = jnp.where(useful, _smaller(state.smallest, smallest), state.smallest)
        if self.ignores_flat:
            begins, size = state.count == 1, jnp.linalg.norm(image)
            first = replace(probe, descent=Descent.start(image, self.steps), first=size, on=size > 0)
            after = choose(begins, first, after)
            known, singular = jnp.where(begins, state.smallest, known), singular & ~begins
        reason = jnp.where(singular, Reason.ILL_POSED, state.reason).astype(jnp.int32)
        return replace(state, probe=after, smallest=known, reason=reason)

    def _check_residual(self, state: _State, residual: Float[Array, " d"], floor: Float[Array, ""]) -> _State:
        """The residual computed anew: the end, or the start of another cycle."""
        residual = residual - self.damping * state.x
        size, first = norm(residual), state.begin == 0
        error = _error(state, size + floor, state.smallest)
        solved = (~first & (error <= 2 * self._tolerance(residual))) | (size == 0)
        waits = solved & self._awaits_probe(state)
        hopeless = ~first & ((size > LITTLE_PROGRESS * state.begin) | (size <= 3 * floor))
        reason = jnp.where(solved, Reason.TOLERANCE, jnp.where(hopeless, Reason.INACCURATE, state.reason))
        reason = jnp.where(waits, state.reason, reason)
        return replace(
            state,
            descent=Descent.start(residual / jnp.where(size > 0, size, 1), self.steps),
            begin=jnp.where(waits, state.begin, size),
            drift=jnp.zeros_like(state.drift),
            error=jnp.where(size == 0, 0, jnp.where(first, state.error, error)),
            phase=jnp.where(waits, RESIDUAL, DIRECTION).astype(jnp.int32),
            reason=jnp.where(state.reason == RUNNING, reason, state.reason).astype(jnp.int32),
            along_x=state.along,
        )

    def _step(self, state: _State, image: Float[Array, " d"], rounding: Float[Array, ""], floor: Any) -> _State:
        """A step along the direction."""
        descent, length = state.descent.advance(image)
        singular = state.descent.curvature(image) <= floor
        smallest = _smaller(state.smallest, descent.ritz.smallest(floor))
        singular = singular | (smallest <= floor)
        drift = jnp.hypot(state.drift, rounding * length)
        error = _error(state, state.begin * (descent.size + drift), smallest)
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

    def _awaits_probe(self, state: _State) -> Bool[Array, ""]:
        """Whether the probe may still find the Hessian singular.

        An outer gradient with few of its eigenvectors is dealt with before the others are seen. About 1/√d of the
        probe is along any of them, and stays in its residual where there is no curvature. The probe is random: at less
        than a thousandth of that, one of 1,250 hides a direction. Only the first and the last outer step wait, as that
        would cost the others what they save by starting from the step before.
        """
        if state.probe is None or self.ignores_flat:
            return jnp.zeros((), bool)
        hidden = HIDDEN / jnp.sqrt(state.x.size) * state.probe.first
        return state.probe.on & (state.probe.descent.size > hidden) & state.thorough

    def _tolerance(self, like: Array) -> Any:
        return default_tolerance(like.dtype) if self.tolerance is None else self.tolerance


def _multiply(problem: Problem, state: _State, ctx: Context) -> _State:
    """A client's products with what `phase` says, and with the probe's direction."""
    back, examples = ravel_pytree(state.params)[1], everything(ctx.data.train)
    at_residual = state.phase == RESIDUAL
    vector = jnp.where(at_residual, state.x, state.descent.direction)
    product, along = problem.products(state.params, state.hyper, examples, back(vector))
    image, size = ravel_pytree(product)[0], norm(vector)
    squared = (norm(image) / jnp.where(size > 0, size, 1)) ** 2
    # What is averaged is made here, where it replaces what was averaged before.
    image = jnp.where(at_residual, state.source - image, image)
    state = replace(state, image=image, squared=squared, along=along)
    if state.probe is None:
        return state
    product = problem.hessian_product(state.params, state.hyper, examples, back(state.probe.descent.direction))
    return replace(state, probe=replace(state.probe, image=ravel_pytree(product)[0]))


def _message(state: _State, ctx: Context) -> tuple[Any, Array]:
    """What is averaged: the products, how large they are at this client, and how sensitive its result is."""
    largest, probed = state.squared, None
    if state.probe is not None:
        probed, direction = state.probe.image, jnp.linalg.norm(state.probe.descent.direction)
        own = (jnp.linalg.norm(probed) / jnp.where(direction > 0, direction, 1)) ** 2
        largest = jnp.maximum(largest, jnp.where(state.probe.on, own, 0))
    value = jax.tree.map(jnp.subtract, state.direct, state.along_x)
    weighed, most = state.reach * norm(state.x), 1 / jnp.sqrt(jnp.finfo(state.x.dtype).eps)
    scale = scale_of(state.reach, state.direct, value, state.x)  # at least `weighed` over `most`
    ratio = jnp.where(weighed > 0, weighed / jnp.where(scale > 0, scale, 1), jnp.sign(state.reach) * most)
    return (state.image, probed, state.squared, largest, ratio**4), jnp.ones(())


def _error(state: _State, residual: Float[Array, ""], smallest: Float[Array, ""]) -> Float[Array, ""]:
    """The relative error of any v_i, from the residual and the smallest eigenvalue; `ratio` belongs to x."""
    away = residual / _positive(_smaller(state.expected, smallest))
    size = norm(state.x)
    error = jnp.minimum(state.ratio * away / jnp.where(size > 0, size, 1), LARGEST)
    return jnp.where(size > 0, error, jnp.sign(state.ratio) * LARGEST)


def _remembered(state: _State) -> Float[Array, ""]:
    """The smallest eigenvalue for the next outer step. A run that saw little of it raises it by a little only."""
    known = CAUTION * state.expected
    return jnp.where(state.smallest > 0, _smaller(CAUTION * known, state.smallest), known)


def _positive(number: Float[Array, ""]) -> Float[Array, ""]:
    """The number, or the smallest positive one."""
    return jnp.maximum(number, jnp.finfo(number.dtype).tiny)


def _smaller(known: Float[Array, ""], found: Float[Array, ""]) -> Float[Array, ""]:
    """The smaller of two, where 0 is not known."""
    return jnp.where(known > 0, jnp.minimum(known, found), found)
