"""TTSA: one inner and one outer step at a time on one machine, at two time scales."""

from dataclasses import replace
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from hyperpush.algorithms.base import LOOP, Algorithm, BilevelState
from hyperpush.algorithms.inverse import ConjugateGradients, Inverse, check_estimates
from hyperpush.algorithms.pooled import common, inner_descent, outer_descent, pooled_hypergradient
from hyperpush.algorithms.steps import check_step_sizes
from hyperpush.checks import check_integer
from hyperpush.method import MethodInfo, as_number
from hyperpush.optimizers import StepSize
from hyperpush.problem import Problem
from hyperpush.programs import Context, Node, Repeat, Scope, Sequence


class _State(eqx.Module):
    params: PyTree
    hyper: PyTree
    value: PyTree


class TTSA(Algorithm):
    """Two-timescale stochastic approximation: one inner step, then one outer step at the new params.

    All clients share the params y and the hypers x. With the mean inner cost g, the mean outer cost F,
    H = ∂²_yy g and J = ∂²_xy g (Hong et al., arXiv:2007.05170):

        y ← y − β_k ∂_y g(x, y)
        x ← x − α_k (∂_xF − J H⁻¹ ∂_yF)(x, y)

    **Use it** with mini-batches and falling step sizes; the paper lets α_k fall like k^−3/5 and β_k like k^−2/5.
    **Avoid it** where a server is too expensive: every iteration takes exact averages.

    Departures from the paper:

    1. `inverse` is conjugate gradients on all examples by default. The paper draws a random `Neumann`.
    2. The hypers are not projected to a set.

    Args:
        steps: Iterations. With 0 everybody gets the mean start.
        outer_step_size: α, above 0; a number or a schedule by iteration.
        inner_step_size: β, above 0; a number or a schedule by iteration. Constant steps need β < 2/λ_max(H).
        inverse: How H⁻¹ is applied: `ConjugateGradients(steps)` or `Neumann(terms, step_size)`.
        batch_size: Examples per estimate, drawn anew each time; None uses all. Numbers need `inverse=Neumann(…)`.

    Raises:
        InvalidInput: An option is out of range; the message names it and what is allowed.
    """

    info: ClassVar[MethodInfo] = MethodInfo(
        network="server",
        target="global",
        sends="vectors of the size of the params, and the hypers",
        paper="Hong et al., A two-timescale stochastic algorithm framework for bilevel optimization, arXiv:2007.05170",
        note="one machine with all data, or exact averages",
        fixed_point="x_G",
        example={"steps": 3, "outer_step_size": 0.05, "inner_step_size": 0.1},
    )

    steps: int = eqx.field(static=True)
    outer_step_size: StepSize = eqx.field(converter=as_number)
    inner_step_size: StepSize = eqx.field(converter=as_number)
    inverse: Inverse = ConjugateGradients()
    batch_size: int | None = eqx.field(static=True, default=None)

    def __check_init__(self):
        check_integer("TTSA.steps", self.steps, minimum=0)
        check_step_sizes(self, "outer_step_size", "inner_step_size")
        check_estimates("TTSA", self.inverse, self.batch_size)

    def program(self, problem: Problem) -> Node:
        def enter(state: BilevelState, ctx: Context) -> _State:
            return _State(state.params, state.hyper, jax.tree.map(jnp.zeros_like, state.hyper))

        iteration = Sequence(
            inner_descent(problem, self.inner_step_size, self.batch_size),
            pooled_hypergradient(problem, self.inverse, self.batch_size),
            outer_descent(self.outer_step_size),
        )
        return Scope(
            Sequence(common("params", "hyper"), Repeat(iteration, self.steps, name=LOOP)),
            enter,
            leave=lambda before, state, ctx: replace(before, params=state.params, hyper=state.hyper),
        )
