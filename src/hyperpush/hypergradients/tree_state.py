"""A client's state for conjugate gradients on exact averages, and the products of one iteration."""

from dataclasses import replace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Bool, Float, Int, PyTree

from hyperpush.data.batches import full_batch
from hyperpush.hypergradients.systems import scale_of
from hyperpush.programs import Context
from hyperpush.programs.report import LARGEST
from hyperpush.solving.descent import Descent
from hyperpush.solving.settings import norm
from hyperpush.task.problem import Problem

# Vector that clients average in an iteration: the residual at x, the product with the direction, or a given vector.
RESIDUAL, DIRECTION, GIVEN, ENDED = range(4)
# Stages: the estimate, the mean params, the Newton step from the mean params, and the estimate after this step.
FIRST, CENTER, NEWTON, SECOND, JUDGED = range(5)
RUNNING = -1  # in place of a reason to end
CAUTION = 1.3  # factor by which the smallest eigenvalue may have fallen from one point to the next


class TreeMemory(eqx.Module):
    """A client's memory for the next outer step."""

    x: Float[Array, "*clients d"]
    smallest: Float[Array, "*clients"]  # smallest eigenvalue of the mean Hessian so far; 0: none yet


class Probe(eqx.Module):
    """A second right-hand side, random and common, that reveals directions without a part in the first."""

    descent: Descent
    image: Float[Array, " d"]  # H_i times its direction
    first: Float[Array, ""]  # size of its residual at the start
    on: Bool[Array, ""]  # True until it has finished


class Judged(eqx.Module):
    """Quality of the params: their distance from solved, and its effect on the estimate."""

    value: PyTree  # v_i, the estimate at x_i
    memory: TreeMemory  # memory of the estimate `value`
    error: Float[Array, ""]  # relative error of the estimate `value`
    away: Float[Array, ""]  # ‖x_i − x̄‖ in units of ‖x̄‖
    extent: Float[Array, ""]  # ‖x̄‖
    size: Float[Array, ""]  # mean ‖v_i‖ over the clients, later rms ‖v_i⁺‖
    rounding: Float[Array, ""]  # possible contribution of rounding to the mean gradient
    residual: Float[Array, ""]  # ‖δ‖/‖x̄‖; below 0: unknown
    disagreement: Float[Array, ""]  # rms ‖x_i − x̄‖/‖x̄‖; below 0: unknown
    moved: Float[Array, ""]  # rms ‖v_i − v_i⁺‖ over the size of v⁺; below 0: unknown

    @staticmethod
    def start(value: PyTree, memory: TreeMemory, error: Float[Array, ""]) -> "Judged":
        zero = jnp.zeros_like(error)
        return Judged(value, memory, error, zero, zero, zero, zero, zero - 1, zero - 1, zero - 1)


class TreeState(eqx.Module):
    params: PyTree
    hyper: PyTree
    source: Float[Array, " d"]  # (1/n)∂_x F_i
    direct: PyTree  # (1/n)∂_λ F_i
    jacobian_norm: Float[Array, ""]  # ‖B_i‖
    x: Float[Array, " d"]
    along_x: PyTree  # B_i x, summed over the steps
    descent: Descent
    probe: Probe | None
    image: Float[Array, " d"]  # H_i times `vector`; source minus that for the residual
    squared: Float[Array, ""]  # (‖H_i p‖/‖p‖)² for p = `vector`
    along: PyTree  # B_i p for p = `vector`
    phase: Int[Array, ""]
    stage: Int[Array, ""]
    reason: Int[Array, ""]
    count: Int[Array, ""]  # iterations of this stage so far
    ended: Int[Array, ""]  # progress that the root of the tree reported
    certify: Bool[Array, ""]  # True to wait for the probe and to judge the params
    expected: Float[Array, ""]  # smallest eigenvalue of the mean Hessian, from the outer step before; 0: unknown
    smallest: Float[Array, ""]  # smallest eigenvalue of the mean Hessian, from this estimate; 0: none yet
    largest: Float[Array, ""]  # largest mean curvature of the clients' Hessians so far
    drift: Float[Array, ""]  # possible contribution of rounding to the residual since its last computation
    begin: Float[Array, ""]  # norm of the residual at the start of a cycle; `descent` is in units of it
    ratio: Float[Array, ""]  # largest ratio of the relative errors of v_i and of x
    error: Float[Array, ""]  # estimated relative error of v
    start: Float[Array, ""]  # ‖params before training‖; 0: unknown
    before: Float[Array, ""]  # rms ‖v_i‖ at the first outer step; 0 in that step, or if it did not pass
    skip: Float[Array, ""]  # distance from solved below which params need no second estimate
    judged: Judged | None
    common: bool = eqx.field(static=True)  # True if hypers are common; their mean hypergradient is compared
    alone: bool = eqx.field(static=True)  # True outside of an algorithm; inside, v may vanish at the end
    measures: bool = eqx.field(static=True, default=False)  # True: only measures how far params are from solved

    @property
    def vector(self) -> Float[Array, " d"]:
        """Vector to multiply in this iteration."""
        return jnp.where(self.phase == RESIDUAL, self.x, self.descent.direction)

    @property
    def value(self) -> PyTree:
        """Estimate v_i at the current x."""
        return jax.tree.map(jnp.subtract, self.direct, self.along_x)

    @property
    def memory(self) -> TreeMemory:
        """Memory for the next outer step, with a slightly raised eigenvalue if this run did not confirm it."""
        known = CAUTION * self.expected
        found = jnp.where(self.smallest > 0, smaller(CAUTION * known, self.smallest), known)
        return TreeMemory(self.x, found)

    def positive(self, found: Float[Array, ""]) -> Float[Array, ""]:
        """Return the smallest known eigenvalue, above 0."""
        return positive(smaller(self.expected, found))


def multiply(problem: Problem, state: TreeState, ctx: Context) -> TreeState:
    """Return the state with the products of the Hessian and of the Jacobian with `vector`.

    If there is a probe, also compute the product of the Hessian with the probe's direction.
    """
    back, examples = ravel_pytree(state.params)[1], full_batch(ctx.data.train)
    vector = state.vector
    product, along = problem.products(state.params, state.hyper, examples, back(vector))
    image, size = ravel_pytree(product)[0], norm(vector)
    squared = (norm(image) / jnp.where(size > 0, size, 1)) ** 2
    # These values overwrite those of the previous average.
    image = jnp.where(state.phase == RESIDUAL, state.source - image, image)
    if state.judged is not None:
        given = state.phase == GIVEN
        image, squared = jnp.where(given, state.image, image), jnp.where(given, state.squared, squared)
    state = replace(state, image=image, squared=squared, along=along)
    if state.probe is None:
        return state
    product = problem.hessian_product(state.params, state.hyper, examples, back(state.probe.descent.direction))
    return replace(state, probe=replace(state.probe, image=ravel_pytree(product)[0]))


def message(state: TreeState, ctx: Context) -> tuple[Any, Array]:
    """Return the values to average, and the client's weight of 1.

    The values are the Hessian products of the estimate and of the probe, with the squares of their relative sizes. The
    sensitivity of the result to errors of x follows, then the terms that judge the params.
    """
    largest, probed = state.squared, None
    if state.probe is not None:
        probed, direction = state.probe.image, jnp.linalg.norm(state.probe.descent.direction)
        own = (jnp.linalg.norm(probed) / jnp.where(direction > 0, direction, 1)) ** 2
        largest = jnp.maximum(largest, jnp.where(state.probe.on, own, 0))
    share = float(jnp.finfo(state.x.dtype).eps) if state.alone else None
    scale = scale_of(state.jacobian_norm, state.direct, state.value, state.x, share)
    weighed, most = state.jacobian_norm * norm(state.x), 1 / jnp.sqrt(jnp.finfo(state.x.dtype).eps)
    ratio = jnp.where(weighed > 0, weighed / jnp.where(scale > 0, scale, 1), jnp.sign(state.jacobian_norm) * most)
    return (state.image, probed, state.squared, largest, ratio**4, _terms(state)), jnp.ones(())


def _terms(state: TreeState) -> tuple[Array, Array] | None:
    """Return the client's two terms for judging the params; None before the judgment begins.

    In the stages at the mean params x̄ they are (‖x_i − x̄‖/‖x̄‖)² and ‖v_i‖. In the stage of the second estimate v⁺ they
    are the squares of ‖v_i − v_i⁺‖ and of ‖v_i⁺‖, in units of the mean ‖v_i‖.
    """
    judged = state.judged
    if judged is None:
        return None
    along = jax.tree.map(lambda now, sum: jnp.where(state.phase == RESIDUAL, now, sum), state.along, state.along_x)
    value = jax.tree.map(jnp.subtract, state.direct, along)
    unit = jnp.where(judged.size > 0, judged.size, 1)
    changed = norm(jax.tree.map(jnp.subtract, judged.value, value)) / unit
    size = scale_of(state.jacobian_norm, state.direct, value, state.x) / unit
    first, own = jnp.where(state.stage == SECOND, changed, judged.away), jnp.minimum(norm(judged.value), LARGEST)
    return _square(first), jnp.where(state.stage == SECOND, _square(size), own)


def _square(number: Float[Array, ""]) -> Float[Array, ""]:
    """Return the square, at most `LARGEST`."""
    return jnp.minimum(number, LARGEST**0.5) ** 2


def over(number: Float[Array, ""], size: Float[Array, ""]) -> Float[Array, ""]:
    """Return `number` / `size`, at most `LARGEST`; 0/0 is 0."""
    quotient = jnp.minimum(number / jnp.where(size > 0, size, 1), LARGEST)
    return jnp.where(size > 0, quotient, jnp.sign(number) * LARGEST)


def relative_error(state: TreeState, residual: Float[Array, ""], smallest: Float[Array, ""]) -> Float[Array, ""]:
    """Return the largest relative error of the v_i, from the residual, the smallest eigenvalue and rounding.

    Rounding changes both terms of v_i by about ε of their size, which matters where they cancel.
    """
    away = residual / state.positive(smallest)
    size = norm(state.x)
    rounding = 2 * jnp.finfo(size.dtype).eps if state.alone else 0
    error = jnp.minimum(state.ratio * (away / jnp.where(size > 0, size, 1) + rounding), LARGEST)
    return jnp.where(size > 0, error, jnp.sign(state.ratio) * LARGEST)


def positive(number: Float[Array, ""]) -> Float[Array, ""]:
    """Return the number, but at least the smallest positive number of its type."""
    return jnp.maximum(number, jnp.finfo(number.dtype).tiny)


def smaller(known: Float[Array, ""], found: Float[Array, ""]) -> Float[Array, ""]:
    """Return the smaller of two positive numbers; a `known` of 0 means unknown."""
    return jnp.where(known > 0, jnp.minimum(known, found), found)
