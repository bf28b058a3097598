"""Common part of DSBO-JHIP and MA-DSBO: each iteration has rounds on y, rounds on a product and one round on x."""

import abc
from collections.abc import Callable
from dataclasses import replace

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, PyTree

from hyperpush.algorithms.base import BilevelState, TwoLevelDescent, descend, move_towards, track
from hyperpush.base.numbers import as_number
from hyperpush.base.ranges import Count, OptionalCount
from hyperpush.base.schedules import Rate, StepSize, step_size_at
from hyperpush.data.batches import minibatch
from hyperpush.programs import Context, Exchange, Inbox, Local, Node, Repeat, Sequence
from hyperpush.task.problem import Problem


class Tracker(eqx.Module):
    """A client's estimate of the mean gradient, and the own gradient that this estimate last included."""

    mean: PyTree  # d, the estimate of the mean gradient
    own: PyTree  # the client's own gradient in d

    @staticmethod
    def start(gradient: PyTree) -> "Tracker":
        return Tracker(gradient, gradient)


class ProductState(eqx.Module):
    """A client's state in a `ProductTracking` algorithm."""

    params: PyTree  # y
    hyper: PyTree  # x
    solution: PyTree  # solution of the linear system, a vector z or a matrix Z
    direction: PyTree  # r, along which x descends
    iteration: Int[Array, ""]  # iteration of the outermost loop, for schedules
    solution_tracker: Tracker
    inner_tracker: Tracker | None
    outer_tracker: Tracker | None


def descent(
    value: str,
    gradient: Callable[[ProductState, Context], PyTree],
    step_size: StepSize,
    tracker: str | None = None,
    diffuse: bool = False,
) -> Exchange:
    """Return one round of gossip and descent on the state's field v that `value` names.

        without a tracker   v ← Wv − γg(v)
        with a tracker d    v⁺ = Wv − γd,  d⁺ = Wd + g(v⁺) − g(v)

    g is the client's own gradient; with mini-batches g(v) is the gradient that d last included. `tracker` names the
    field that holds d. With `diffuse`, v⁺ = W(v − γd), which allows a larger step size γ.
    """

    def step(at: PyTree, along: PyTree, state: ProductState) -> PyTree:
        return descend(at, along, step_size_at(step_size, state.iteration))

    def send(state: ProductState, ctx: Context) -> PyTree:
        at = getattr(state, value)
        if tracker is None:
            return at
        mean = getattr(state, tracker).mean
        return step(at, mean, state) if diffuse else at, mean

    def receive(state: ProductState, inbox: Inbox, ctx: Context) -> ProductState:
        mixed = inbox.mix(send(state, ctx))
        if tracker is None:
            return replace(state, **{value: step(mixed, gradient(state, ctx), state)})
        before, (at, mean) = getattr(state, tracker), mixed
        after = replace(state, **{value: at if diffuse else step(at, before.mean, state)})
        own = gradient(after, ctx)
        return replace(after, **{tracker: Tracker(track(mean, own, before.own), own)})

    return Exchange(send, receive, weights="gossip")


class ProductTracking(TwoLevelDescent):
    """The base class of algorithms that solve a linear system for the hypergradient by gradient tracking.

    An iteration has gossip on the params y, then gradient tracking on the linear system. Then r ← (1 − θ)r + θu and
    x ← Wx − αr, with the hypers x and the client's part u of the hypergradient. With `tracked`, y and x also follow
    trackers of their mean gradients, all in the form v ← W(v − γd). Then trackers are never restarted.
    """

    product_step_size: Rate = eqx.field(converter=as_number)
    inner_steps: Count = eqx.field(static=True, default=1)
    product_steps: Count = eqx.field(static=True, default=1)
    tracked: bool = eqx.field(static=True, default=False)
    batch_size: OptionalCount = eqx.field(static=True, default=None)

    @abc.abstractmethod
    def zero_solution(self, params: PyTree, hyper: PyTree) -> PyTree:
        """Return zeros in the shape of the linear system's solution."""

    @abc.abstractmethod
    def residual(self, problem: Problem, state: ProductState, ctx: Context) -> PyTree:
        """Return the client's part of the linear system's residual."""

    @abc.abstractmethod
    def hypergradient(self, problem: Problem, state: ProductState, ctx: Context) -> PyTree:
        """Return u, the client's part of the hypergradient."""

    def new_share(self, iteration: Int[Array, ""]) -> object:
        """Return θ, the weight of the new hypergradient in r."""
        return 1

    def program(self, problem: Problem) -> Node:
        def inner(state: BilevelState | ProductState, ctx: Context) -> PyTree:
            return problem.inner_gradient(
                state.params, state.hyper, minibatch(ctx.data.train, self.batch_size, ctx.key)
            )

        def residual(state: ProductState, ctx: Context) -> PyTree:
            return self.residual(problem, state, ctx)

        def enter(state: BilevelState, ctx: Context) -> ProductState:
            first, second, third = (replace(ctx, key=key) for key in jax.random.split(ctx.key, 3))
            zeros, start = self.zero_solution(state.params, state.hyper), jnp.zeros((), jnp.int32)
            begun = ProductState(state.params, state.hyper, zeros, state.hyper, start, Tracker.start(zeros), None, None)
            begun = restart(replace(begun, direction=self.hypergradient(problem, begun, first)), second)
            if not self.tracked:
                return begun
            inner_tracker = Tracker.start(inner(state, third))
            return replace(begun, inner_tracker=inner_tracker, outer_tracker=Tracker.start(begun.direction))

        def restart(state: ProductState, ctx: Context) -> ProductState:
            return replace(state, solution_tracker=Tracker.start(residual(state, ctx)))

        def average(state: ProductState, ctx: Context) -> ProductState:
            new = self.hypergradient(problem, state, ctx)
            return replace(state, direction=move_towards(state.direction, new, self.new_share(state.iteration)))

        def count(state: ProductState, ctx: Context) -> ProductState:
            return replace(state, iteration=state.iteration + 1)

        inner_tracker, outer_tracker = ("inner_tracker", "outer_tracker") if self.tracked else (None, None)
        solve = descent("params", inner, self.inner_step_size, inner_tracker, diffuse=True)
        invert = descent("solution", residual, self.product_step_size, "solution_tracker", diffuse=self.tracked)
        iteration = Sequence(
            Repeat(solve, self.inner_steps, name="inner"),
            Sequence() if self.tracked else Local(restart),
            Repeat(invert, self.product_steps, name="product"),
            Local(average),
            descent("hyper", lambda state, ctx: state.direction, self.outer_step_size, outer_tracker, diffuse=True),
            Local(count),
        )
        return self.iterate(iteration, enter)
