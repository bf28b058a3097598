"""Measure how far each client's params are from its own inner solution, and the effect on the hypergradient."""

from dataclasses import replace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Bool, Float, PyTree

from hyperpush.base.status import CHANGED, EXACT, UNSOLVED, Reason
from hyperpush.data.batches import full_batch
from hyperpush.hypergradients.base import HypergradientState
from hyperpush.hypergradients.implicit import System
from hyperpush.hypergradients.judging import LACKING
from hyperpush.hypergradients.local_implicit import own_hypergradient, solve_own
from hyperpush.hypergradients.tree_state import over
from hyperpush.programs import Average, Context, Node, Scope
from hyperpush.programs.report import LARGEST, Report
from hyperpush.solving.common import probe_of
from hyperpush.solving.settings import norm
from hyperpush.task.problem import Problem

PRODUCTS = 200  # largest number of Hessian products in one Newton step
NEWTON_STEPS = 10  # enough, because near the solution each step squares the distance


class Step(eqx.Module):
    """A client's own Newton step δ_i = H_i⁻¹ g_i."""

    length: Float[Array, " d"]
    lacks: Float[Array, ""]  # estimated norm of the largest missing part of the step
    flat: Bool[Array, ""]  # True if a direction lacks positive curvature, or if a probe meets negative curvature


class _State(eqx.Module):
    params: PyTree
    hyper: PyTree
    first: Float[Array, ""]  # size of the hypergradient at the first outer step; 0: unknown
    residual: Float[Array, ""]  # ‖δ_i‖/‖x_i‖
    distance: Float[Array, ""]  # ‖δ_i‖ over the larger of ‖x_i‖ and the norm of the initial params
    short: Bool[Array, ""]  # True if the products did not suffice for δ_i
    flat: Bool[Array, ""]
    changed: PyTree  # v_i − v_i⁺
    value: PyTree  # v_i⁺
    reason: Array
    moved: Float[Array, ""]


def own_step(problem: Problem, params: PyTree, hyper: PyTree, ctx: Context, probed: bool = False) -> Step:
    """Return the Newton step of the client's own inner cost, by conjugate gradients.

    With `probed`, a random right-hand side also looks for negative curvature, and for directions of small curvature
    that the gradient does not contain.
    """
    batch = full_batch(ctx.data.train)
    gradient = ravel_pytree(problem.inner_gradient(params, hyper, batch))[0]
    steps = _steps(gradient.size)
    rights = [gradient, *([probe_of(gradient.size, gradient.dtype, ctx)] if probed else [])]
    systems = [System.start(right, steps) for right in rights]
    system, *rest = solve_own(problem, params, hyper, batch, systems, steps)
    smallest, flat = system.smallest(), system.flat
    for probe in rest:
        weakest = probe.smallest()
        smallest = jnp.minimum(smallest, jnp.where(weakest > probe.floor, weakest, jnp.inf))
        flat = flat | _bends_down(problem, params, hyper, batch, probe)
    lacks = jnp.where(system.solved, 0, jnp.minimum(system.error(smallest), LARGEST))
    return Step(system.q, lacks, flat)


def _bends_down(problem: Problem, params: PyTree, hyper: PyTree, batch: PyTree, system: System) -> Bool[Array, ""]:
    """Return True if a system ended at a direction of negative, not zero, curvature, which shows a saddle point."""
    direction, back = system.direction, ravel_pytree(params)[1]
    image = ravel_pytree(problem.hessian_product(params, hyper, batch, back(direction)))[0]
    return system.flat & (direction @ image < -system.floor * (direction @ direction))


def own_solution(problem: Problem, params: PyTree, hyper: PyTree, ctx: Context) -> PyTree:
    """Return the minimizer of the client's own inner cost near these params, by Newton steps."""
    vector, back = ravel_pytree(params)

    def improve(_: Any, vector: Float[Array, " d"]) -> Float[Array, " d"]:
        return vector - own_step(problem, back(vector), hyper, ctx).length

    return back(jax.lax.fori_loop(0, NEWTON_STEPS, improve, vector))


def own_value(problem: Problem, params: PyTree, hyper: PyTree, ctx: Context) -> PyTree:
    """Return the hypergradient of the client's own outer cost through its own Hessian."""
    batches = full_batch(ctx.data.train), full_batch(ctx.data.outer)
    return own_hypergradient(problem, params, hyper, *batches, _steps(ravel_pytree(params)[0].size))


def _steps(size: int) -> int:
    return min(2 * size, PRODUCTS)


class OwnJudge(eqx.Module):
    """Judge the params of clients that train alone by the rule of `hypergradients.judging`, with own Hessians.

    Args:
        common: True if hypers are common; then the clients' mean hypergradient is compared.
        estimates: True compares hypergradients; False only measures the distance to the clients' own solutions.
    """

    common: bool = eqx.field(static=True, default=False)
    estimates: bool = eqx.field(static=True, default=True)

    def program(self, problem: Problem) -> Node:
        """Return a program on `HypergradientState` that sets its report."""

        def enter(state: HypergradientState, ctx: Context) -> _State:
            return self._look(problem, state, ctx)

        def leave(before: HypergradientState, state: _State, ctx: Context) -> HypergradientState:
            report = Report.of(state.reason).judged(state.residual, -1, state.moved)
            return replace(before, report=report)

        return Scope(Average(self._message, self._judge, rounds=1, by="exact"), enter, leave)

    def _look(self, problem: Problem, state: HypergradientState, ctx: Context) -> _State:
        vector, back = ravel_pytree(state.params)
        zero = jnp.zeros((), vector.dtype)
        start = zero if state.start is None else state.start.astype(vector.dtype)
        step = own_step(problem, state.params, state.hyper, ctx, probed=True)
        none = jax.tree.map(jnp.zeros_like, state.hyper)
        size, length = norm(vector), norm(step.length)
        value, changed = none, none
        if self.estimates:
            here = own_value(problem, state.params, state.hyper, ctx)
            value = own_value(problem, back(vector - step.length), state.hyper, ctx)
            changed = jax.tree.map(jnp.subtract, here, value)
        return _State(
            params=state.params,
            hyper=state.hyper,
            first=zero if state.size is None else state.size.astype(vector.dtype),
            residual=over(length, size),
            distance=over(length, jnp.maximum(size, start)),
            short=step.lacks > LACKING * length + EXACT * size,
            flat=step.flat,
            changed=changed,
            value=value,
            reason=jnp.zeros((), jnp.int32),
            moved=zero - 1,
        )

    def _message(self, state: _State, ctx: Context) -> tuple[Any, Array]:
        pair = state.changed, state.value
        pair = pair if self.common else tuple(_square(norm(tree)) for tree in pair)
        numbers = _square(state.residual), _square(state.distance), state.short * 1.0, state.flat * 1.0
        return (numbers, pair), jnp.ones(())

    def _judge(self, state: _State, means: Any, mass: Any, ctx: Context) -> _State:
        (residual, distance, short, flat), (changed, value) = means
        residual, distance = jnp.sqrt(residual), jnp.sqrt(distance)
        changed, value = (norm(each) if self.common else jnp.sqrt(each) for each in (changed, value))
        moved = over(changed, jnp.maximum(value, state.first))
        exact, compared = residual <= EXACT, jnp.asarray(self.estimates)
        reason = jnp.select(
            [flat > 0, exact, distance > UNSOLVED, short > 0, compared & (moved > CHANGED)],
            [Reason.ILL_POSED, Reason.TOLERANCE, Reason.UNSOLVED, Reason.LIMIT, Reason.UNSOLVED],
            Reason.TOLERANCE,
        )
        unknown = jnp.full_like(residual, -1)
        moved = jnp.where(compared & ~exact & (distance <= UNSOLVED) & (flat == 0), moved, unknown)
        residual = jnp.where(flat > 0, unknown, residual)
        return replace(state, reason=reason.astype(jnp.int32), residual=residual, moved=moved)


def _square(number: Float[Array, ""]) -> Float[Array, ""]:
    """Return the square, at most `LARGEST`."""
    return jnp.minimum(number, LARGEST**0.5) ** 2
