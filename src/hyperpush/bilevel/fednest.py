"""FedNest: rounds of corrected local steps on both levels, around a server."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, PRNGKeyArray, PyTree

from hyperpush.bilevel.algorithm import LOOP, Bilevel
from hyperpush.bilevel.inverse import ConjugateGradients, Inverse, check_estimates, down
from hyperpush.bilevel.pooled import common, mean, pooled_hypergradient
from hyperpush.bilevel.steps import Step, check_step, step_at
from hyperpush.bilevel.storm import at_both, recursive
from hyperpush.checks import whole
from hyperpush.data.batches import draw, everything
from hyperpush.estimators.state import Declaration
from hyperpush.problem import Problem
from hyperpush.program import Context, Local, Node, Repeat, Sequence, Within


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


class FedNest(eqx.Module):
    """`inner_rounds` rounds on y, the hyper-gradient h̄ at (x, y) with averaged products, then one round on x.

        y_i ← y_i − β(∂_y g_i(x, y_i) − ∂_y g_i(x, y) + mean_k ∂_y g_k(x, y))
        x_i ← x_i − α(∂_xF_i(x_i, y) − ∂_xF_i(x, y) + h̄)

    A round on y is `inner_steps` such steps from the common y, and the mean of all y_i after them; one on x alike, with
    `outer_steps`.

    x is everybody's hyper and y everybody's params, g the inner cost. α is `outer_step`, β `inner_step`, both by
    iteration. ∂_y g_k in the mean is on all examples, the other derivatives on batches. Tarzanagh, Li, Thrampoulidis,
    Oymak 2022, who take a random `inverse=Neumann(…)`.
    """

    declares: ClassVar[Declaration] = Declaration(
        network="a server, or any that can average exactly",
        target="global: everybody's mean outer cost",
        sends="vectors of the size of the params, and the hypers",
        matrices=False,
        paper="Tarzanagh et al., FedNest: federated bilevel, minimax, and compositional optimization",
        fixed_point="x_G",
    )

    iterations: int = eqx.field(static=True)
    outer_step: Step = eqx.field(static=True)
    inner_step: Step = eqx.field(static=True)
    inner_rounds: int = eqx.field(static=True, default=1)
    inner_steps: int = eqx.field(static=True, default=1)
    outer_steps: int = eqx.field(static=True, default=1)
    inverse: Inverse = ConjugateGradients()
    batch: int | None = eqx.field(static=True, default=None)

    def __check_init__(self):
        whole("FedNest.iterations", self.iterations, least=0)
        check_step("FedNest.outer_step", self.outer_step)
        check_step("FedNest.inner_step", self.inner_step)
        for field in ("inner_rounds", "inner_steps", "outer_steps"):
            whole(f"FedNest.{field}", getattr(self, field), least=1)
        check_estimates("FedNest", self.inverse, self.batch)

    def program(self, problem: Problem) -> Node:
        def enter(state: Bilevel, ctx: Context) -> _State:
            zero = jax.tree.map(jnp.zeros_like, state.hyper)
            return _State(state.params, state.hyper, zero, jnp.zeros((), jnp.int32))

        def anchor(state: _State, ctx: Context) -> PyTree:
            return problem.inner_gradient(state.params, state.hyper, everything(ctx.data.inner))

        def inner(state: _State, pull: PyTree, ctx: Context) -> _State:
            def gradient(params: PyTree, key: PRNGKeyArray) -> PyTree:
                return problem.inner_gradient(params, state.hyper, draw(ctx.data.inner, self.batch, key))

            rate = step_at(self.inner_step, state.iteration)
            return replace(state, params=corrected_steps(gradient, state.params, pull, rate, self.inner_steps, ctx.key))

        def outer(state: _State, pull: PyTree, ctx: Context) -> _State:
            def gradient(hyper: PyTree, key: PRNGKeyArray) -> PyTree:
                return problem.outer_gradients(state.params, hyper, draw(ctx.data.outer, self.batch, key))[1]

            rate = step_at(self.outer_step, state.iteration)
            return replace(state, hyper=corrected_steps(gradient, state.hyper, pull, rate, self.outer_steps, ctx.key))

        def count(state: _State, ctx: Context) -> _State:
            return replace(state, iteration=state.iteration + 1)

        iteration = Sequence(
            Repeat(Sequence(mean(anchor, inner), common("params")), self.inner_rounds, name="inner rounds"),
            pooled_hypergradient(problem, self.inverse, self.batch),
            mean(lambda state, ctx: state.value, outer),
            common("hyper"),
            Local(count),
        )
        return Within(
            Sequence(common("params", "hyper"), Repeat(iteration, self.iterations, name=LOOP)),
            enter,
            leave=lambda before, state, ctx: replace(before, params=state.params, hyper=state.hyper),
        )
