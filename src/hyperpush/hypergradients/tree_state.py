"""What a client keeps while conjugate gradients run on exact averages, and one iteration of them."""

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

# What a client averages in an iteration: the residual at x, the image of the next direction, or a vector as it is.
RESIDUAL, DIRECTION, GIVEN, ENDED = range(4)
# What the iterations are for: the estimate, the mean params, a Newton step there, and the estimate at its end.
FIRST, CENTER, NEWTON, SECOND, JUDGED = range(5)
RUNNING = -1  # no reason to end yet
CAUTION = 1.3  # the smallest eigenvalue may have fallen by so much from one point to the next


class TreeMemory(eqx.Module):
    """What a client keeps for the next outer step."""

    x: Float[Array, "*clients d"]
    smallest: Float[Array, "*clients"]  # eigenvalue of the mean Hessian seen so far; 0: none yet


class Probe(eqx.Module):
    """A second right-hand side, random and common: the directions that the first has no part in are not overlooked."""

    descent: Descent
    image: Float[Array, " d"]  # H_i times its direction
    first: Float[Array, ""]  # size of its residual at the start
    on: Bool[Array, ""]


class Judged(eqx.Module):
    """What is known of the params: how far they are from solved, and how much that changes the estimate."""

    value: PyTree  # v_i, the estimate at x_i
    memory: TreeMemory  # of that estimate
    error: Float[Array, ""]  # of that estimate
    away: Float[Array, ""]  # ‖x_i − x̄‖ in units of ‖x̄‖
    extent: Float[Array, ""]  # ‖x̄‖
    size: Float[Array, ""]  # mean ‖v_i‖ over the clients, and then rms ‖v_i⁺‖
    rounding: Float[Array, ""]  # what it may have added to the mean gradient
    residual: Float[Array, ""]  # ‖δ‖/‖x̄‖; below 0: not known
    disagreement: Float[Array, ""]  # rms ‖x_i − x̄‖/‖x̄‖; below 0: not known
    moved: Float[Array, ""]  # rms ‖v_i − v_i⁺‖ over the size of v⁺; below 0: not known

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
    along_x: PyTree  # B_i x, summed up on the way
    descent: Descent
    probe: Probe | None
    image: Float[Array, " d"]  # H_i times what `phase` says, or the source less that for the residual
    squared: Float[Array, ""]  # (‖H_i p‖/‖p‖)² for that p
    along: PyTree  # B_i p
    phase: Int[Array, ""]
    stage: Int[Array, ""]
    reason: Int[Array, ""]
    count: Int[Array, ""]  # iterations of this stage so far
    ended: Int[Array, ""]  # how far the root of the tree is
    certify: Bool[Array, ""]  # whether to wait for the probe, and to judge the params
    expected: Float[Array, ""]  # smallest eigenvalue of the mean Hessian, by the outer step before; 0: not known
    smallest: Float[Array, ""]  # the same, as far as it was seen now; 0: not yet
    largest: Float[Array, ""]  # curvature of the clients' Hessians seen so far, in the mean
    drift: Float[Array, ""]  # what rounding may have added to the residual since it was computed anew
    begin: Float[Array, ""]  # size of the residual at the start of a cycle, in which the descent counts
    ratio: Float[Array, ""]  # the relative error of any v_i is at most so many times that of x
    error: Float[Array, ""]  # of v, relative, as estimated
    start: Float[Array, ""]  # ‖params before training‖; 0: not known
    before: Float[Array, ""]  # rms ‖v_i‖ at the first outer step; 0: this is it, or it did not pass
    skip: Float[Array, ""]  # params so close to solved need no second estimate
    judged: Judged | None
    common: bool = eqx.field(static=True)  # whether hypers agree, so that their mean hypergradient counts

    @property
    def vector(self) -> Float[Array, " d"]:
        """What is multiplied in this iteration."""
        return jnp.where(self.phase == RESIDUAL, self.x, self.descent.direction)

    @property
    def value(self) -> PyTree:
        """v_i by the x found so far."""
        return jax.tree.map(jnp.subtract, self.direct, self.along_x)

    @property
    def memory(self) -> TreeMemory:
        """What to keep for the next outer step. A run that saw little of the smallest eigenvalue raises it a little."""
        known = CAUTION * self.expected
        found = jnp.where(self.smallest > 0, smaller(CAUTION * known, self.smallest), known)
        return TreeMemory(self.x, found)

    def positive(self, found: Float[Array, ""]) -> Float[Array, ""]:
        """The smallest eigenvalue by all that is known, above 0."""
        return positive(smaller(self.expected, found))


def multiply(problem: Problem, state: TreeState, ctx: Context) -> TreeState:
    """A client's products with what `phase` says, and with the probe's direction."""
    back, examples = ravel_pytree(state.params)[1], full_batch(ctx.data.train)
    vector = state.vector
    product, along = problem.products(state.params, state.hyper, examples, back(vector))
    image, size = ravel_pytree(product)[0], norm(vector)
    squared = (norm(image) / jnp.where(size > 0, size, 1)) ** 2
    # What is averaged is made here, where it replaces what was averaged before.
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
    """What is averaged: products and their size, how sensitive the client's result is, and what judges the params."""
    largest, probed = state.squared, None
    if state.probe is not None:
        probed, direction = state.probe.image, jnp.linalg.norm(state.probe.descent.direction)
        own = (jnp.linalg.norm(probed) / jnp.where(direction > 0, direction, 1)) ** 2
        largest = jnp.maximum(largest, jnp.where(state.probe.on, own, 0))
    scale = scale_of(state.jacobian_norm, state.direct, state.value, state.x)  # at least `weighed` over `most`
    weighed, most = state.jacobian_norm * norm(state.x), 1 / jnp.sqrt(jnp.finfo(state.x.dtype).eps)
    ratio = jnp.where(weighed > 0, weighed / jnp.where(scale > 0, scale, 1), jnp.sign(state.jacobian_norm) * most)
    return (state.image, probed, state.squared, largest, ratio**4, _terms(state)), jnp.ones(())


def _terms(state: TreeState) -> tuple[Array, Array] | None:
    """What judges the params.

    At x̄: the square of ‖x_i − x̄‖ in units of ‖x̄‖, and ‖v_i‖. For the second estimate: the squares of ‖v_i − v_i⁺‖ and
    of ‖v_i⁺‖, in units of the mean ‖v_i‖.
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
    """The square, below `LARGEST`."""
    return jnp.minimum(number, LARGEST**0.5) ** 2


def over(number: Float[Array, ""], size: Float[Array, ""]) -> Float[Array, ""]:
    """The quotient, at most `LARGEST`; 0 of 0 is 0."""
    quotient = jnp.minimum(number / jnp.where(size > 0, size, 1), LARGEST)
    return jnp.where(size > 0, quotient, jnp.sign(number) * LARGEST)


def relative_error(state: TreeState, residual: Float[Array, ""], smallest: Float[Array, ""]) -> Float[Array, ""]:
    """The relative error of any v_i, from the residual and the smallest eigenvalue; `ratio` belongs to x."""
    away = residual / state.positive(smallest)
    size = norm(state.x)
    error = jnp.minimum(state.ratio * away / jnp.where(size > 0, size, 1), LARGEST)
    return jnp.where(size > 0, error, jnp.sign(state.ratio) * LARGEST)


def positive(number: Float[Array, ""]) -> Float[Array, ""]:
    """The number, or the smallest positive one."""
    return jnp.maximum(number, jnp.finfo(number.dtype).tiny)


def smaller(known: Float[Array, ""], found: Float[Array, ""]) -> Float[Array, ""]:
    """The smaller of two, where 0 is not known."""
    return jnp.where(known > 0, jnp.minimum(known, found), found)
