"""Judge whether params solve the inner problem closely enough, in stages that follow an estimate.

The stages use the same averages as the estimate. At the clients' mean params x̄, the Newton step is
δ = H(x̄)⁻¹ mean g_i(x̄), with the mean Hessian H and the inner gradients g_i. A second estimate is made at x̄ − δ. The
errors of both estimates from the solver are known. So their difference measures the error that unsolved params cause.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Bool, Float

from hyperpush.base.status import CHANGED, UNSOLVED, Reason
from hyperpush.data.batches import full_batch
from hyperpush.hypergradients.tree_state import (
    CAUTION,
    DIRECTION,
    ENDED,
    FIRST,
    GIVEN,
    JUDGED,
    RESIDUAL,
    RUNNING,
    Judged,
    TreeState,
    over,
    smaller,
)
from hyperpush.programs import Context
from hyperpush.programs.report import LARGEST
from hyperpush.solving.common import ROUNDING, choose
from hyperpush.solving.descent import Descent
from hyperpush.solving.settings import norm
from hyperpush.task.problem import Problem

SOLVED = 1e-2  # share of the mean gradient to which the residual of the Newton step must fall
LACKING = 0.1  # largest share of the Newton step that may be missing


def begin_stage(problem: Problem, state: TreeState, ctx: Context, first: int, anew: bool) -> TreeState:
    """Return the start state of a stage; `ctx.round` counts stages from `first`.

    `anew` starts the solution for the second estimate from zero instead of from the solution of the first one.
    """

    def center(state: TreeState) -> TreeState:
        judged = Judged.start(state.value, state.memory, state.error)
        return _given(replace(state, judged=judged), ravel_pytree(state.params)[0])

    def newton(state: TreeState) -> TreeState:
        params = ravel_pytree(state.params)[1](state.x)
        gradient = problem.inner_gradient(params, state.hyper, full_batch(ctx.data.train))
        assert state.judged is not None
        known, none = state.judged.memory.smallest / CAUTION, jnp.zeros_like(state.smallest)
        state = replace(state, params=params, x=jnp.zeros_like(state.x), smallest=none)
        return _given(replace(state, expected=known), ravel_pytree(gradient)[0])

    def second(state: TreeState) -> TreeState:
        at, back = ravel_pytree(state.params)
        params = back(at - state.x)
        gradients = problem.outer_gradients(params, state.hyper, full_batch(ctx.data.outer))
        source, direct = jax.tree.map(lambda leaf: leaf / ctx.clients, gradients)
        assert state.judged is not None
        zero, x = jnp.zeros_like(state.begin), jnp.zeros_like(state.x) if anew else state.judged.memory.x
        state = replace(state, params=params, source=ravel_pytree(source)[0], direct=direct, x=x)
        return replace(state, phase=jnp.int32(RESIDUAL), begin=zero, drift=zero)

    stage = jnp.int32(first) + ctx.round
    begun = jax.lax.switch(stage, [lambda state: state, center, newton, second], state)
    zero = jnp.zeros_like(state.count)
    begun = replace(begun, count=zero, ended=zero, reason=jnp.full_like(state.reason, RUNNING))
    return replace(choose(stage == FIRST, state, begun), stage=stage)


def _given(state: TreeState, vector: Float[Array, " d"]) -> TreeState:
    """Return the state in which the next iteration averages this vector."""
    return replace(state, image=vector, squared=norm(vector) ** 2, phase=jnp.int32(GIVEN))


def take_center(state: TreeState, mean: Float[Array, " d"]) -> TreeState:
    """Return the state with the mean params x̄ in `x` and the distance of the client's own params from x̄."""
    assert state.judged is not None
    extent = norm(mean)
    away = over(norm(ravel_pytree(state.params)[0] - mean), extent)
    judged = replace(state.judged, away=away, extent=extent)
    return replace(state, x=mean, judged=judged, phase=jnp.int32(ENDED))


def take_gradient(state: TreeState, mean: Float[Array, " d"], squared: Array, terms: Any) -> TreeState:
    """Return the state with the mean gradient at x̄; its norm is the unit of the descent towards the Newton step."""
    judged, size = state.judged, norm(mean)
    assert judged is not None
    away, values = terms
    judged = replace(
        judged,
        size=values,
        rounding=ROUNDING * jnp.finfo(mean.dtype).eps * jnp.sqrt(squared),
        disagreement=jnp.sqrt(away),
    )
    descent = Descent.start(mean / jnp.where(size > 0, size, 1), state.descent.ritz.pivots.size)
    state = replace(state, judged=judged, descent=descent, begin=size, phase=jnp.int32(DIRECTION))
    return _judge_step(state, jnp.zeros((), bool))


def step_to_solution(state: TreeState, image: Float[Array, " d"], floor: Array) -> TreeState:
    """Return the state after a step of the descent, in which `x` approaches δ."""
    curvature = state.descent.curvature(image)
    descent, length = state.descent.advance(image)
    x = state.x + state.begin * length * state.descent.direction
    found = smaller(state.smallest, descent.ritz.smallest(floor))
    flat = curvature <= floor
    after = choose(flat, state, replace(state, x=x, descent=descent, smallest=found))
    reason = jnp.where(curvature < -floor, Reason.ILL_POSED, RUNNING).astype(jnp.int32)
    return _judge_step(replace(after, reason=reason), flat)


def _judge_step(state: TreeState, flat: Bool[Array, ""]) -> TreeState:
    """Return the state with a verdict on the Newton step: unknown as yet, too long, or too short to matter."""
    judged, step = state.judged, norm(state.x)
    assert judged is not None
    left = state.begin * state.descent.size
    beyond = jnp.maximum(left - judged.rounding, 0)
    lacks = jnp.where(beyond > 0, jnp.minimum(beyond / state.positive(state.smallest), LARGEST), 0)
    small = over(step + lacks, judged.extent)
    exact = small + judged.disagreement <= state.skip
    far = over(step, jnp.maximum(judged.extent, state.start)) > UNSOLVED
    enough = (lacks <= LACKING * step) & (left <= jnp.maximum(SOLVED * state.begin, judged.rounding))
    found = jnp.select([exact, far], [Reason.TOLERANCE, Reason.UNSOLVED], RUNNING).astype(jnp.int32)
    ill = state.reason == Reason.ILL_POSED
    known = jnp.where(exact, small, over(step, judged.extent))
    judged = replace(judged, residual=jnp.where(ill, -1, known))
    return replace(
        state,
        judged=judged,
        reason=jnp.where(ill, state.reason, found),
        phase=jnp.where(exact | far | enough | flat | ill, ENDED, DIRECTION).astype(jnp.int32),
    )


def end_step(state: TreeState, limit: int) -> TreeState:
    """Return the state after an iteration of the Newton stage; a verdict makes a second estimate unnecessary."""
    late = (state.count >= limit) & (state.phase != ENDED)
    reason = jnp.where(late, Reason.LIMIT, state.reason).astype(jnp.int32)
    phase = jnp.where(late, ENDED, state.phase).astype(jnp.int32)
    over = (reason != RUNNING) & (phase == ENDED)
    return replace(state, reason=reason, phase=phase, stage=jnp.where(over, JUDGED, state.stage).astype(jnp.int32))


def compare(state: TreeState, changed: Float[Array, ""], size: Float[Array, ""]) -> TreeState:
    """Return the state judged by the norm `changed` of the difference of both estimates and the second one's `size`."""
    judged = state.judged
    assert judged is not None
    moved = over(changed, jnp.maximum(size, state.before))
    failed = jnp.where(moved <= CHANGED, Reason.TOLERANCE, Reason.UNSOLVED)
    good, ill = state.reason == Reason.TOLERANCE, state.reason == Reason.ILL_POSED
    judged = replace(
        judged,
        moved=jnp.where(good, moved, -1),
        size=size,
        residual=jnp.where(ill, -1, judged.residual),
    )
    reason = jnp.where(good, failed, jnp.where(state.reason == RUNNING, Reason.LIMIT, state.reason))
    return replace(state, judged=judged, reason=reason.astype(jnp.int32), stage=jnp.int32(JUDGED))
