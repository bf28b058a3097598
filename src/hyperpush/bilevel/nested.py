"""What DSBO-JHIP and MA-DSBO share: in every iteration some rounds on y, some on a product, one on x."""

import abc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, PyTree

from hyperpush.bilevel.algorithm import LOOP, Bilevel
from hyperpush.bilevel.inverse import down
from hyperpush.bilevel.steps import Step, check_step, step_at
from hyperpush.checks import whole, yes_or_no
from hyperpush.data.batches import draw
from hyperpush.problem import Problem
from hyperpush.program import Context, Exchange, Inbox, Local, Node, Repeat, Sequence, Within


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
    step: Step,
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
        return down(at, along, step_at(step, state.iteration))

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


class Nested(eqx.Module):
    """y by gossip; the solution of a linear system by gradient tracking; r ← (1 − θ)r + θu and x ← Wx − αr.

    With `tracked` y and x follow trackers of their mean gradients as well, all in the form v ← W(v − γd), and no
    tracker starts anew.
    """

    iterations: int = eqx.field(static=True)
    outer_step: Step = eqx.field(static=True)
    inner_step: Step = eqx.field(static=True)
    product_step: Step = eqx.field(static=True)
    inner_rounds: int = eqx.field(static=True, default=1)
    product_rounds: int = eqx.field(static=True, default=1)
    tracked: bool = eqx.field(static=True, default=False)
    batch: int | None = eqx.field(static=True, default=None)

    def __check_init__(self):
        name = type(self).__name__
        whole(f"{name}.iterations", self.iterations, least=0)
        for step in ("outer_step", "inner_step", "product_step"):
            check_step(f"{name}.{step}", getattr(self, step))
        whole(f"{name}.inner_rounds", self.inner_rounds, least=1)
        whole(f"{name}.product_rounds", self.product_rounds, least=1)
        yes_or_no(f"{name}.tracked", self.tracked)
        if self.batch is not None:
            whole(f"{name}.batch", self.batch, least=1)

    @abc.abstractmethod
    def unsolved(self, params: PyTree, hyper: PyTree) -> PyTree:
        """Zeros of the solution's shape."""

    @abc.abstractmethod
    def residual(self, problem: Problem, state: NestedState, ctx: Context) -> PyTree:
        """The client's part of the linear system's residual."""

    @abc.abstractmethod
    def hypergradient(self, problem: Problem, state: NestedState, ctx: Context) -> PyTree:
        """u, the client's part of the hyper-gradient."""

    def weight(self, iteration: Int[Array, ""]) -> Any:
        """θ: what part of r is new."""
        return 1

    def program(self, problem: Problem) -> Node:
        def inner(state: Bilevel | NestedState, ctx: Context) -> PyTree:
            return problem.inner_gradient(state.params, state.hyper, draw(ctx.data.inner, self.batch, ctx.key))

        def residual(state: NestedState, ctx: Context) -> PyTree:
            return self.residual(problem, state, ctx)

        def enter(state: Bilevel, ctx: Context) -> NestedState:
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
        solving = descent("params", inner, self.inner_step, inner_tracker, diffuse=True)
        inverting = descent("solution", residual, self.product_step, "solution_tracker", diffuse=self.tracked)
        body = Sequence(
            Repeat(solving, self.inner_rounds, name="inner"),
            Sequence() if self.tracked else Local(restart),
            Repeat(inverting, self.product_rounds, name="product"),
            Local(average),
            descent("hyper", direction, self.outer_step, outer_tracker, diffuse=True),
            Local(count),
        )
        return Within(
            Repeat(body, self.iterations, name=LOOP),
            enter,
            leave=lambda before, state, ctx: Bilevel(state.params, state.hyper),
        )
