"""BSA: bilevel stochastic approximation on one machine, the reference of all others."""

import math
from dataclasses import replace
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, PyTree

from hyperpush.algorithms.base import LOOP, Algorithm, BilevelState
from hyperpush.algorithms.inverse import ConjugateGradients, Inverse, check_estimates
from hyperpush.algorithms.pooled import common, inner_descent, outer_descent, pooled_hypergradient
from hyperpush.algorithms.steps import check_step_sizes
from hyperpush.checks import check_integer, check_probability
from hyperpush.method import MethodInfo, as_number
from hyperpush.optimizers import StepSize
from hyperpush.problem import Problem
from hyperpush.programs import Context, Local, Node, Repeat, Scope, Sequence


class _State(eqx.Module):
    params: PyTree
    hyper: PyTree
    value: PyTree
    first: PyTree  # the params at the start


class BSA(Algorithm):
    """Bilevel stochastic approximation: inner steps until the params fit, then one outer step.

    All clients share the params y and the hypers x. With the mean inner cost g, the mean outer cost F,
    H = ∂²_yy g and J = ∂²_xy g (Ghadimi and Wang, arXiv:1802.02246), iteration k = 0, 1, … is

        repeat t_k = ⌈inner_steps·(k + 1)^growth⌉ times:
            y ← y − β_t ∂_y g(x, y)
        x ← x − α_k (∂_xF − J H⁻¹ ∂_yF)(x, y)

    α is the outer and β the inner step size. A schedule of α counts k; one of β counts t from 0 in every iteration.

    **Use it** as the reference of what a network could reach: it needs exact averages. **Avoid it** where a server is
    too expensive: iteration k takes t_k + 2 averages and those of the inverse.

    Departures from the paper:

    1. `inverse` is conjugate gradients on all examples by default. The paper draws a random `Neumann`.

    Args:
        steps: Outer iterations. With 0 everybody gets the mean start.
        outer_step_size: α, above 0; a number or a schedule.
        inner_step_size: β, above 0; a number or a schedule. Constant steps need β < 2/λ_max(H).
        inner_steps: Inner steps of the first iteration, at least 1.
        growth: Exponent from 0 to 1; 0 takes `inner_steps` in every iteration, the paper takes ½. It shapes the
            program: a new value compiles anew.
        inverse: How H⁻¹ is applied: `ConjugateGradients(steps)` or `Neumann(terms, step_size)`.
        batch_size: Examples per estimate, drawn anew each time; None uses all. Numbers need `inverse=Neumann(…)`.
        restart: Start the inner steps of every iteration from the first params instead of the last ones.

    Raises:
        InvalidInput: An option is out of range; the message names it and what is allowed.
    """

    info: ClassVar[MethodInfo] = MethodInfo(
        network="server",
        target="global",
        sends="vectors of the size of the params, and the hypers",
        paper="Ghadimi and Wang, Approximation methods for bilevel programming, arXiv:1802.02246",
        note="one machine with all data, or exact averages",
        fixed_point="x_G",
        example={"steps": 3, "outer_step_size": 0.1, "inner_step_size": 0.1, "inner_steps": 2},
    )

    steps: int = eqx.field(static=True)
    outer_step_size: StepSize = eqx.field(converter=as_number)
    inner_step_size: StepSize = eqx.field(converter=as_number)
    inner_steps: int = eqx.field(static=True, default=1)
    growth: float = eqx.field(static=True, converter=float, default=0.5)
    inverse: Inverse = ConjugateGradients()
    batch_size: int | None = eqx.field(static=True, default=None)
    restart: bool = eqx.field(static=True, default=False)

    def __check_init__(self):
        check_integer("BSA.steps", self.steps, minimum=0)
        check_step_sizes(self, "outer_step_size", "inner_step_size")
        check_integer("BSA.inner_steps", self.inner_steps, minimum=1)
        check_probability("BSA.growth", self.growth)
        check_estimates("BSA", self.inverse, self.batch_size)

    def program(self, problem: Problem) -> Node:
        def enter(state: BilevelState, ctx: Context) -> _State:
            return _State(state.params, state.hyper, jax.tree.map(jnp.zeros_like, state.hyper), state.params)

        def begin(state: _State, ctx: Context) -> _State:
            return replace(state, params=state.first) if self.restart else state

        def times(state: _State, ctx: Context) -> Int[Array, ""]:
            return jnp.ceil(self.inner_steps * (ctx.round + 1.0) ** self.growth).astype(jnp.int32)

        most = math.ceil(self.inner_steps * self.steps**self.growth) + 1  # rounded alike or one more
        descent = inner_descent(problem, self.inner_step_size, self.batch_size)
        grows = self.growth > 0
        solve = Repeat(descent, most if grows else self.inner_steps, times=times if grows else None)
        improve = Sequence(
            pooled_hypergradient(problem, self.inverse, self.batch_size), outer_descent(self.outer_step_size)
        )
        return Scope(
            Sequence(
                common("params", "hyper", "first"),
                Repeat(Sequence(Local(begin), solve, improve), self.steps, name=LOOP),
            ),
            enter,
            leave=lambda before, state, ctx: replace(before, params=state.params, hyper=state.hyper),
        )
