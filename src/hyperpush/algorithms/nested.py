"""What DSBO-JHIP and MA-DSBO share: in every iteration some rounds on y, some on a product, one on x."""

import abc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, PyTree

from hyperpush.algorithms.base import LOOP, Algorithm, BilevelState
from hyperpush.algorithms.inverse import down
from hyperpush.algorithms.steps import check_step_sizes
from hyperpush.checks import check_integer
from hyperpush.data.batches import draw
from hyperpush.method import as_number
from hyperpush.optimizers import StepSize, step_size_at
from hyperpush.problem import Problem
from hyperpush.programs import Context, Exchange, Inbox, Local, Node, Repeat, Scope, Sequence


class Tracker(eqx.Module):
    """A client's estimate of the mean gradient, and its own gradient in it."""

    mean: PyTree  # d
    own: PyTree

    @staticmethod
    def start(gradient: PyTree) -> "Tracker":
        return Tracker(gradient, gradient)


class NestedState(eqx.Module):
    params: PyTree  # y
    hyper: PyTree  # x
    solution: PyTree  # of the linear system, a vector z or a matrix Z
    direction: PyTree  # r, along which x descends
    iteration: Int[Array, ""]  # of the outermost loop, for schedules
    solution_tracker: Tracker
    inner_tracker: Tracker | None
    outer_tracker: Tracker | None


def descent(
    value: str,
    gradient: Callable[[NestedState, Context], PyTree],
    step_size: StepSize,
    tracker: str | None = None,
    diffuse: bool = False,
) -> Exchange:
    """One round in which the field `value` of the state descends; v is what it holds.

        without a tracker   v ← Wv − γg(v)
        with                v⁺ = Wv − γd,  d⁺ = Wd + g(v⁺) − g(v);     `diffuse`: v⁺ = W(v − γd), which bears larger γ

    g is the client's own gradient; with mini-batches g(v) is the one that d took in before. `tracker` names the field
    that holds d.
    """

    def moved(at: PyTree, along: PyTree, state: NestedState) -> PyTree:
        return down(at, along, step_size_at(step_size, state.iteration))

    def send(state: NestedState, ctx: Context) -> PyTree:
        at = getattr(state, value)
        if tracker is None:
            return at
        mean = getattr(state, tracker).mean
        return moved(at, mean, state) if diffuse else at, mean

    def receive(state: NestedState, inbox: Inbox, ctx: Context) -> NestedState:
        mixed = inbox.mix(send(state, ctx))
        if tracker is None:
            return replace(state, **{value: moved(mixed, gradient(state, ctx), state)})
        before, (at, mean) = getattr(state, tracker), mixed
        after = replace(state, **{value: at if diffuse else moved(at, before.mean, state)})
        own = gradient(after, ctx)
        mean = jax.tree.map(lambda d, new, old: d + new - old, mean, own, before.own)
        return replace(after, **{tracker: Tracker(mean, own)})

    return Exchange(send, receive, weights="gossip")


class Nested(Algorithm):
    """y by gossip; the solution of a linear system by gradient tracking; r ← (1 − θ)r + θu and x ← Wx − αr.

    With `tracked` y and x follow trackers of their mean gradients as well, all in the form v ← W(v − γd), and no
    tracker starts anew.
    """

    steps: int = eqx.field(static=True)
    outer_step_size: StepSize = eqx.field(converter=as_number)
    inner_step_size: StepSize = eqx.field(converter=as_number)
    product_step_size: StepSize = eqx.field(converter=as_number)
    inner_steps: int = eqx.field(static=True, default=1)
    product_steps: int = eqx.field(static=True, default=1)
    tracked: bool = eqx.field(static=True, default=False)
    batch_size: int | None = eqx.field(static=True, default=None)

    def __check_init__(self):
        name = type(self).__name__
        check_integer(f"{name}.steps", self.steps, minimum=0)
        check_step_sizes(self, "outer_step_size", "inner_step_size", "product_step_size")
        check_integer(f"{name}.inner_steps", self.inner_steps, minimum=1)
        check_integer(f"{name}.product_steps", self.product_steps, minimum=1)
        if self.batch_size is not None:
            check_integer(f"{name}.batch_size", self.batch_size, minimum=1)

    @abc.abstractmethod
    def unsolved(self, params: PyTree, hyper: PyTree) -> PyTree:
        """Zeros of the solution's shape."""

    @abc.abstractmethod
    def residual(self, problem: Problem, state: NestedState, ctx: Context) -> PyTree:
        """The client's part of the linear system's residual."""

    @abc.abstractmethod
    def hypergradient(self, problem: Problem, state: NestedState, ctx: Context) -> PyTree:
        """u, the client's part of the hypergradient."""

    def weight(self, iteration: Int[Array, ""]) -> Any:
        """θ: what part of r is new."""
        return 1

    def program(self, problem: Problem) -> Node:
        def inner(state: BilevelState | NestedState, ctx: Context) -> PyTree:
            return problem.inner_gradient(state.params, state.hyper, draw(ctx.data.train, self.batch_size, ctx.key))

        def residual(state: NestedState, ctx: Context) -> PyTree:
            return self.residual(problem, state, ctx)

        def enter(state: BilevelState, ctx: Context) -> NestedState:
            first, second, third = (replace(ctx, key=key) for key in jax.random.split(ctx.key, 3))
            zeros, start = self.unsolved(state.params, state.hyper), jnp.zeros((), jnp.int32)
            begun = NestedState(state.params, state.hyper, zeros, state.hyper, start, Tracker.start(zeros), None, None)
            begun = restart(replace(begun, direction=self.hypergradient(problem, begun, first)), second)
            if not self.tracked:
                return begun
            inner_tracker = Tracker.start(inner(state, third))
            return replace(begun, inner_tracker=inner_tracker, outer_tracker=Tracker.start(begun.direction))

        def restart(state: NestedState, ctx: Context) -> NestedState:
            return replace(state, solution_tracker=Tracker.start(residual(state, ctx)))

        def average(state: NestedState, ctx: Context) -> NestedState:
            weight, new = self.weight(state.iteration), self.hypergradient(problem, state, ctx)
            return replace(
                state, direction=jax.tree.map(lambda r, u: (r + weight * (u - r)).astype(r.dtype), state.direction, new)
            )

        def count(state: NestedState, ctx: Context) -> NestedState:
            return replace(state, iteration=state.iteration + 1)

        def direction(state: NestedState, ctx: Context) -> PyTree:
            return state.direction

        inner_tracker, outer_tracker = ("inner_tracker", "outer_tracker") if self.tracked else (None, None)
        solving = descent("params", inner, self.inner_step_size, inner_tracker, diffuse=True)
        inverting = descent("solution", residual, self.product_step_size, "solution_tracker", diffuse=self.tracked)
        body = Sequence(
            Repeat(solving, self.inner_steps, name="inner"),
            Sequence() if self.tracked else Local(restart),
            Repeat(inverting, self.product_steps, name="product"),
            Local(average),
            descent("hyper", direction, self.outer_step_size, outer_tracker, diffuse=True),
            Local(count),
        )
        return Scope(
            Repeat(body, self.steps, name=LOOP),
            enter,
            leave=lambda before, state, ctx: BilevelState(state.params, state.hyper),
        )
