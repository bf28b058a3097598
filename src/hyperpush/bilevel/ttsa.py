"""TTSA: one inner and one outer step at a time on one machine, at two time scales."""

from dataclasses import replace
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from hyperpush.bilevel.algorithm import LOOP, Bilevel
from hyperpush.bilevel.inverse import ConjugateGradients, Inverse, check_estimates
from hyperpush.bilevel.pooled import common, inner_descent, outer_descent, pooled_hypergradient
from hyperpush.bilevel.steps import Step, check_step
from hyperpush.checks import whole
from hyperpush.estimators.state import Declaration
from hyperpush.problem import Problem
from hyperpush.program import Context, Node, Repeat, Sequence, Within


class _State(eqx.Module):
    params: PyTree
    hyper: PyTree
    value: PyTree


class TTSA(eqx.Module):
    """y⁺ = y − β_k ∂_y g(x, y),  x⁺ = x − α_k(∂_xF − J H^{-1} ∂_yF)(x, y⁺), all of them means.

    x is the hyper and y the params of one machine with everybody's data, g the mean inner cost and F the mean outer
    cost. α is `outer_step`, β `inner_step`. Hong, Wai, Wang, Yang 2020, who take a random `inverse=Neumann(…)`, α_k
    falling like k^-3/5 and β_k like k^-2/5.
    """

    declares: ClassVar[Declaration] = Declaration(
        network="one machine, or any that can average exactly",
        target="global: everybody's mean outer cost",
        sends="vectors of the size of the params, and the hypers",
        matrices=False,
        paper="Hong et al., A two-timescale stochastic algorithm framework for bilevel optimization",
        fixed_point="x_G",
    )

    iterations: int = eqx.field(static=True)
    outer_step: Step = eqx.field(static=True)
    inner_step: Step = eqx.field(static=True)
    inverse: Inverse = ConjugateGradients()
    batch: int | None = eqx.field(static=True, default=None)

    def __check_init__(self):
        whole("TTSA.iterations", self.iterations, least=0)
        check_step("TTSA.outer_step", self.outer_step)
        check_step("TTSA.inner_step", self.inner_step)
        check_estimates("TTSA", self.inverse, self.batch)

    def program(self, problem: Problem) -> Node:
        def enter(state: Bilevel, ctx: Context) -> _State:
            return _State(state.params, state.hyper, jax.tree.map(jnp.zeros_like, state.hyper))

        iteration = Sequence(
            inner_descent(problem, self.inner_step, self.batch),
            pooled_hypergradient(problem, self.inverse, self.batch),
            outer_descent(self.outer_step),
        )
        return Within(
            Sequence(common("params", "hyper"), Repeat(iteration, self.iterations, name=LOOP)),
            enter,
            leave=lambda before, state, ctx: replace(before, params=state.params, hyper=state.hyper),
        )
