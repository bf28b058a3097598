"""BSA: bilevel stochastic approximation on one machine, the reference of all others."""

import math
from dataclasses import replace
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, PyTree

from hyperpush.bilevel.algorithm import LOOP, Bilevel
from hyperpush.bilevel.inverse import ConjugateGradients, Inverse, check_estimates
from hyperpush.bilevel.pooled import common, inner_descent, outer_descent, pooled_hypergradient
from hyperpush.bilevel.steps import Step, check_step
from hyperpush.checks import probability, whole, yes_or_no
from hyperpush.estimators.state import Declaration
from hyperpush.problem import Problem
from hyperpush.program import Context, Local, Node, Repeat, Sequence, Within


class _State(eqx.Module):
    params: PyTree
    hyper: PyTree
    value: PyTree
    first: PyTree  # the params at the start


class BSA(eqx.Module):
    """In iteration k: t_k times y ← y − β_t ∂_y g(x, y), then x ← x − α_k(∂_xF − J H^{-1} ∂_yF), all of them means.

    x is the hyper and y the params of one machine with everybody's data, g the mean inner cost and F the mean outer
    cost. t_k = ⌈`inner_steps`·(k + 1)^`growth`⌉, from the last y or, with `restart`, from the first. α is `outer_step`
    and goes by k, β is `inner_step` and goes by t. Ghadimi, Wang 2018, who take a random `inverse=Neumann(…)` and
    growth ½.
    """

    declares: ClassVar[Declaration] = Declaration(
        network="one machine, or any that can average exactly",
        target="global: everybody's mean outer cost",
        sends="vectors of the size of the params, and the hypers",
        matrices=False,
        paper="Ghadimi and Wang, Approximation methods for bilevel programming",
        fixed_point="x_G",
    )

    iterations: int = eqx.field(static=True)
    outer_step: Step = eqx.field(static=True)
    inner_step: Step = eqx.field(static=True)
    inner_steps: int = eqx.field(static=True, default=1)
    growth: float = eqx.field(static=True, converter=float, default=0.5)
    inverse: Inverse = ConjugateGradients()
    batch: int | None = eqx.field(static=True, default=None)
    restart: bool = eqx.field(static=True, default=False)

    def __check_init__(self):
        whole("BSA.iterations", self.iterations, least=0)
        check_step("BSA.outer_step", self.outer_step)
        check_step("BSA.inner_step", self.inner_step)
        whole("BSA.inner_steps", self.inner_steps, least=1)
        probability("BSA.growth", self.growth)
        check_estimates("BSA", self.inverse, self.batch)
        yes_or_no("BSA.restart", self.restart)

    def program(self, problem: Problem) -> Node:
        def enter(state: Bilevel, ctx: Context) -> _State:
            return _State(state.params, state.hyper, jax.tree.map(jnp.zeros_like, state.hyper), state.params)

        def begin(state: _State, ctx: Context) -> _State:
            return replace(state, params=state.first) if self.restart else state

        def times(state: _State, ctx: Context) -> Int[Array, ""]:
            return jnp.ceil(self.inner_steps * (ctx.round + 1.0) ** self.growth).astype(jnp.int32)

        most = math.ceil(self.inner_steps * self.iterations**self.growth) + 1  # rounded alike or one more
        descent = inner_descent(problem, self.inner_step, self.batch)
        solve = Repeat(descent, most if self.growth else self.inner_steps, times=times if self.growth else None)
        improve = Sequence(pooled_hypergradient(problem, self.inverse, self.batch), outer_descent(self.outer_step))
        return Within(
            Sequence(
                common("params", "hyper", "first"),
                Repeat(Sequence(Local(begin), solve, improve), self.iterations, name=LOOP),
            ),
            enter,
            leave=lambda before, state, ctx: replace(before, params=state.params, hyper=state.hyper),
        )
