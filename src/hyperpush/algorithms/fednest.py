"""FedNest: rounds of corrected local steps on both levels, around a server."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, PRNGKeyArray, PyTree

from hyperpush.algorithms.base import LOOP, Algorithm, BilevelState
from hyperpush.algorithms.inverse import ConjugateGradients, Inverse, check_estimates, down
from hyperpush.algorithms.pooled import common, mean, pooled_hypergradient
from hyperpush.algorithms.steps import check_step_sizes
from hyperpush.algorithms.storm import at_both, recursive
from hyperpush.checks import check_integer
from hyperpush.data.batches import draw, everything
from hyperpush.method import MethodInfo, as_number
from hyperpush.optimizers import StepSize, step_size_at
from hyperpush.problem import Problem
from hyperpush.programs import Context, Local, Node, Repeat, Scope, Sequence


class _State(eqx.Module):
    params: PyTree
    hyper: PyTree
    value: PyTree
    iteration: Int[Array, ""]


def corrected_steps(
    gradient: Callable[[PyTree, PRNGKeyArray], PyTree],
    start: PyTree,
    pull: PyTree,
    rate: Any,
    steps: int,
    key: PRNGKeyArray,
) -> PyTree:
    """z ← z − rate·(g_i(z) − g_i(start) + pull), `steps` times from `start`, both gradients on the same batch.

    `pull` is the mean gradient at the start, so that clients do not drift to minima of their own.
    """

    def step(number, z):
        own = jax.random.fold_in(key, number)
        here, before = at_both(lambda point: gradient(point, own), z, start)
        return down(z, recursive(pull, here, before), rate)

    return jax.lax.fori_loop(0, steps, step, start)


class FedNest(Algorithm):
    """Federated nested optimization: rounds of corrected local steps on both levels, around a server.

    All clients share the params y and the hypers x; g_i is a client's inner and F_i its outer cost. An iteration is
    `inner_rounds` rounds on y, the hypergradient h̄ at (x, y) with averaged products, and one round on x (Tarzanagh,
    Li, Thrampoulidis and Oymak, arXiv:2205.02215):

        y_i ← y_i − β(∂_y g_i(x, y_i) − ∂_y g_i(x, y) + mean_k ∂_y g_k(x, y))
        x_i ← x_i − α(∂_xF_i(x_i, y) − ∂_xF_i(x, y) + h̄)

    A round on y is `inner_steps` such steps from the common y, then the mean of all y_i; one on x is `outer_steps`.
    The mean of ∂_y g_k takes all examples; all other derivatives take mini-batches.

    **Use it** where rounds with the server are expensive and clients are unlike: the correction keeps local steps from
    drifting to minima of their own. **Avoid it** without a server: every round takes exact averages.

    Departures from the paper:

    1. `inverse` is conjugate gradients on all examples by default. The paper draws a random `Neumann`.

    Args:
        steps: Iterations. With 0 everybody gets the mean start.
        outer_step_size: α, above 0; a number or a schedule by iteration.
        inner_step_size: β, above 0; a number or a schedule by iteration.
        inner_rounds: Rounds with the server on y per iteration, at least 1.
        inner_steps: Local steps per round on y, at least 1.
        outer_steps: Local steps per round on x, at least 1.
        inverse: How H⁻¹ is applied: `ConjugateGradients(steps)` or `Neumann(terms, step_size)`.
        batch_size: Examples per estimate, drawn anew each time; None uses all. Numbers need `inverse=Neumann(…)`.

    Raises:
        InvalidInput: An option is out of range; the message names it and what is allowed.
    """

    info: ClassVar[MethodInfo] = MethodInfo(
        network="server",
        target="global",
        sends="vectors of the size of the params, and the hypers",
        paper="Tarzanagh et al., FedNest: federated bilevel, minimax, and compositional optimization, arXiv:2205.02215",
        fixed_point="x_G",
        example={"steps": 3, "outer_step_size": 0.05, "inner_step_size": 0.1, "inner_steps": 2},
    )

    steps: int = eqx.field(static=True)
    outer_step_size: StepSize = eqx.field(converter=as_number)
    inner_step_size: StepSize = eqx.field(converter=as_number)
    inner_rounds: int = eqx.field(static=True, default=1)
    inner_steps: int = eqx.field(static=True, default=1)
    outer_steps: int = eqx.field(static=True, default=1)
    inverse: Inverse = ConjugateGradients()
    batch_size: int | None = eqx.field(static=True, default=None)

    def __check_init__(self):
        check_integer("FedNest.steps", self.steps, minimum=0)
        check_step_sizes(self, "outer_step_size", "inner_step_size")
        for field in ("inner_rounds", "inner_steps", "outer_steps"):
            check_integer(f"FedNest.{field}", getattr(self, field), minimum=1)
        check_estimates("FedNest", self.inverse, self.batch_size)

    def program(self, problem: Problem) -> Node:
        def enter(state: BilevelState, ctx: Context) -> _State:
            zero = jax.tree.map(jnp.zeros_like, state.hyper)
            return _State(state.params, state.hyper, zero, jnp.zeros((), jnp.int32))

        def anchor(state: _State, ctx: Context) -> PyTree:
            return problem.inner_gradient(state.params, state.hyper, everything(ctx.data.train))

        def inner(state: _State, pull: PyTree, ctx: Context) -> _State:
            def gradient(params: PyTree, key: PRNGKeyArray) -> PyTree:
                return problem.inner_gradient(params, state.hyper, draw(ctx.data.train, self.batch_size, key))

            rate = step_size_at(self.inner_step_size, state.iteration)
            return replace(state, params=corrected_steps(gradient, state.params, pull, rate, self.inner_steps, ctx.key))

        def outer(state: _State, pull: PyTree, ctx: Context) -> _State:
            def gradient(hyper: PyTree, key: PRNGKeyArray) -> PyTree:
                return problem.outer_gradients(state.params, hyper, draw(ctx.data.outer, self.batch_size, key))[1]

            rate = step_size_at(self.outer_step_size, state.iteration)
            return replace(state, hyper=corrected_steps(gradient, state.hyper, pull, rate, self.outer_steps, ctx.key))

        def count(state: _State, ctx: Context) -> _State:
            return replace(state, iteration=state.iteration + 1)

        iteration = Sequence(
            Repeat(Sequence(mean(anchor, inner), common("params")), self.inner_rounds, name="inner rounds"),
            pooled_hypergradient(problem, self.inverse, self.batch_size),
            mean(lambda state, ctx: state.value, outer),
            common("hyper"),
            Local(count),
        )
        return Scope(
            Sequence(common("params", "hyper"), Repeat(iteration, self.steps, name=LOOP)),
            enter,
            leave=lambda before, state, ctx: replace(before, params=state.params, hyper=state.hyper),
        )
