"""How far a Newton step would move the params: whether they solve the inner problem in its weak directions too."""

from dataclasses import replace
from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Bool, Float, Int, PyTree

from hyperpush.base.status import UNSOLVED, Reason
from hyperpush.data.batches import everything
from hyperpush.hypergradients.base import HypergradientState
from hyperpush.hypergradients.residual import residual_of, sketch_terms
from hyperpush.hypergradients.systems import SystemSolver
from hyperpush.programs import Average, Context, Local, Node, Repeat, Scope, Sequence
from hyperpush.programs.report import LARGEST, Report
from hyperpush.solving.common import ROUNDING, choose
from hyperpush.solving.descent import Descent
from hyperpush.solving.settings import norm
from hyperpush.task.problem import Problem


class _State(eqx.Module):
    params: PyTree
    hyper: PyTree
    smallest: Float[Array, ""]  # eigenvalue of the mean Hessian
    asked: Bool[Array, ""]  # whether there is anything to find out
    residual: Float[Array, ""]  # the quotient of `residual_of`
    extent: Float[Array, ""]  # mean of the clients' ‖x‖
    rounding: Float[Array, ""]  # what it may have added to the mean gradient
    unit: Float[Array, ""]  # ‖mean g_i‖, in which the descent counts; 0: not known yet
    flat: Bool[Array, ""]  # whether a direction without curvature was met
    missing: Float[Array, ""]  # a bound of what the step lacks
    image: Float[Array, " d"]  # g_i, and then H_i times the direction
    descent: Descent
    step: Float[Array, " d"]

    def with_residual(self, size: Float[Array, ""]) -> "_State":
        """With a bound of what the step lacks if the residual has this size."""
        beyond = jnp.maximum(size - self.rounding, 0)
        return replace(self, missing=jnp.where(beyond > 0, jnp.minimum(beyond / self.smallest, LARGEST), 0))

    @property
    def is_decided(self) -> Bool[Array, ""]:
        allowed = UNSOLVED * self.extent
        return ~self.asked | self.flat | (self.missing <= allowed) | (norm(self.step) > allowed)


def append_newton_step(program: Node, problem: Problem, method: SystemSolver, steps: int) -> Node:
    """The program of an estimator that knows the smallest eigenvalue θ, and how far the params are from solved.

    As after other programs, an average of sketches says how large the mean gradient is against its scale. Weak
    directions hardly count there. A Newton step δ moves the params by at most ‖mean g_i‖/θ. If that is below a tenth of
    their size, nothing else is sent. Otherwise conjugate gradients look for δ, until it is longer than that, or what it
    lacks is shorter: ‖δ_k‖ grows with k, and ‖δ − δ_k‖ ≤ ‖r_k‖/θ.
    """

    def enter(state: HypergradientState, ctx: Context) -> _State:
        assert state.report is not None
        assert state.smallest is not None
        gradient = problem.inner_gradient(state.params, state.hyper, everything(ctx.data.train))
        gradient = ravel_pytree(gradient)[0]
        none, zero, no = jnp.zeros_like(gradient), jnp.zeros_like(state.smallest), jnp.zeros((), bool)
        good = state.report.reason == Reason.TOLERANCE
        return _State(
            params=state.params,
            hyper=state.hyper,
            smallest=state.smallest,
            asked=good if state.thorough is None else good & state.thorough,
            residual=zero,
            extent=zero,
            rounding=zero,
            unit=zero,
            flat=no,
            missing=zero,
            image=gradient,
            descent=Descent.start(none, 1),
            step=none,
        )

    def get_terms(state: _State, ctx: Context) -> tuple[Any, Float[Array, ""]]:
        product = problem.hessian_product(state.params, state.hyper, everything(ctx.data.train), state.params)
        terms = sketch_terms(state.image, ravel_pytree(product)[0], ctx)
        return (*terms, norm(state.params)), jnp.ones(())

    def put_terms(state: _State, means: tuple[Any, ...], mass: Any, ctx: Context) -> _State:
        gradient, product, size, extent = means
        rounding, found = ROUNDING * jnp.finfo(size.dtype).eps * size, residual_of(gradient, product, size)
        asked = state.asked & (found <= UNSOLVED)
        state = replace(state, residual=found, extent=extent, rounding=rounding, asked=asked)
        return state.with_residual(norm(gradient))

    def get(state: _State, ctx: Context) -> tuple[Any, Float[Array, ""]]:
        return state.image, jnp.ones(())

    def put(state: _State, image: Float[Array, " d"], mass: Any, ctx: Context) -> _State:
        unit = norm(image)
        first = replace(state, unit=unit, descent=Descent.start(image / jnp.where(unit > 0, unit, 1), 1))
        image = image + method.damping * state.descent.direction
        descent, length = state.descent.advance(image)
        step = state.step + state.unit * length * state.descent.direction
        further = replace(state, descent=descent, step=step).with_residual(state.unit * descent.size)
        flat = state.descent.curvature(image) <= 0
        further = choose(flat, replace(state, flat=flat), further)
        return choose(state.unit == 0, first.with_residual(unit), further)

    def multiply(state: _State, ctx: Context) -> _State:
        direction = ravel_pytree(state.params)[1](state.descent.direction)
        image = problem.hessian_product(state.params, state.hyper, everything(ctx.data.train), direction)
        return replace(state, image=ravel_pytree(image)[0])

    def leave(before: HypergradientState, state: _State, ctx: Context) -> HypergradientState:
        moved = norm(state.step) / jnp.maximum(state.extent, jnp.finfo(state.extent.dtype).tiny)
        assert before.report is not None
        report = before.report.at(jnp.maximum(state.residual, jnp.minimum(moved, LARGEST)))
        if not method.ignores_flat:
            report = choose(state.flat, replace(Report.of(Reason.ILL_POSED), residual=report.residual), report)
        return replace(before, report=report, smallest=None)

    def has_ended(state: _State, ctx: Context) -> Bool[Array, ""]:
        return state.is_decided

    def times(state: _State, ctx: Context) -> Int[Array, ""]:
        return jnp.where(state.is_decided, 0, steps)

    terms, mean = (Average(*pair, rounds=1, by="tree") for pair in ((get_terms, put_terms), (get, put)))
    body = Sequence(mean, Local(multiply))
    loop = Repeat(body, steps, until=has_ended, times=times, name="Newton step", common=True)
    return Sequence(program, Scope(Sequence(terms, loop), enter, leave), appended=True)
