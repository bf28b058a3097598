"""SPDB: primal and dual steps on the outer level, every client's inner problem its own."""

from dataclasses import replace
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from hyperpush.algorithms.base import LOOP, Algorithm, BilevelState
from hyperpush.algorithms.inverse import ConjugateGradients, Inverse, check_estimates, down, own_estimate
from hyperpush.algorithms.steps import check_step_sizes
from hyperpush.checks import check_integer, check_positive
from hyperpush.data.batches import draw
from hyperpush.method import MethodInfo, Number, as_number
from hyperpush.optimizers import StepSize, step_size_at
from hyperpush.problem import Problem
from hyperpush.programs import Context, Exchange, Inbox, Node, Repeat, Scope


class _State(eqx.Module):
    params: PyTree
    hyper: PyTree
    dual: PyTree  # d


class SPDB(Algorithm):
    """Stochastic primal-dual bilevel optimization: hypers agree through a dual variable.

    Each client has params y_i of its own; the hypers x_i become common. With its inner cost g_i, its own hypergradient
    h_i = ∂_xF_i − J_i H_i⁻¹ ∂_yF_i and L = I − W, the Laplacian of the gossip weights (Lu et al. 2022):

        y⁺ = y − β ∂_y g_i(x, y),   x⁺ = x − α(h_i(x, y⁺) + d + ρLx),   d⁺ = d + ρLx⁺

    This is descent on the augmented Lagrangian of min Σ_i F_i with Lx = 0; d is 0 at the start.

    **Use it** on undirected networks where messages must be small: only hypers are sent. **Avoid it** where the inner
    solution must be common: it ends at x_L.

    Departures from the paper:

    1. `inverse` is conjugate gradients on all examples by default, which adds no noise.

    Args:
        steps: Iterations, one round of gossip each.
        outer_step_size: α, above 0; a number or a schedule by iteration. It must be below about 1/ρ.
        inner_step_size: β, above 0; a number or a schedule by iteration.
        penalty: ρ, above 0. Larger values make hypers agree sooner and need a smaller α.
        inverse: How H_i⁻¹ is applied: `ConjugateGradients(steps)` or `Neumann(terms, step_size)`.
        batch_size: Examples per estimate, drawn anew each time; None uses all. Numbers need `inverse=Neumann(…)`.

    Raises:
        InvalidInput: An option is out of range; the message names it and what is allowed.
    """

    info: ClassVar[MethodInfo] = MethodInfo(
        network="undirected",
        target="local",
        sends="hypers",
        paper="Lu et al., Decentralized bilevel optimization for personalized client learning, ICASSP 2022",
        note="the mean of own hypergradients at own inner solutions",
        fixed_point="x_L",
        example={"steps": 3, "outer_step_size": 0.05, "inner_step_size": 0.1, "penalty": 0.5},
    )

    steps: int = eqx.field(static=True)
    outer_step_size: StepSize = eqx.field(converter=as_number)
    inner_step_size: StepSize = eqx.field(converter=as_number)
    penalty: Number = eqx.field(converter=as_number, default=1.0)
    inverse: Inverse = ConjugateGradients()
    batch_size: int | None = eqx.field(static=True, default=None)

    def __check_init__(self):
        check_integer("SPDB.steps", self.steps, minimum=0)
        check_step_sizes(self, "outer_step_size", "inner_step_size")
        check_positive("SPDB.penalty", self.penalty)
        check_estimates("SPDB", self.inverse, self.batch_size)

    def program(self, problem: Problem) -> Node:
        def enter(state: BilevelState, ctx: Context) -> _State:
            return _State(state.params, state.hyper, jax.tree.map(jnp.zeros_like, state.hyper))

        def receive(state: _State, inbox: Inbox, ctx: Context) -> _State:
            below, above = jax.random.split(ctx.key)
            slope = problem.inner_gradient(state.params, state.hyper, draw(ctx.data.train, self.batch_size, below))
            params = down(state.params, slope, step_size_at(self.inner_step_size, ctx.round))
            own = own_estimate(problem, self.inverse, params, state.hyper, ctx.data, self.batch_size, above)
            apart = jax.tree.map(lambda x, mixed: self.penalty * (x - mixed), state.hyper, inbox.mix(state.hyper))
            # One message serves both: this is ρLx⁺ of the iteration before, of which the first has none.
            dual = jax.tree.map(lambda d, a: jnp.where(ctx.round > 0, d + a, d), state.dual, apart)
            along = jax.tree.map(lambda h, d, a: h + d + a, own, dual, apart)
            return _State(params, down(state.hyper, along, step_size_at(self.outer_step_size, ctx.round)), dual)

        return Scope(
            Repeat(Exchange(lambda state, ctx: state.hyper, receive, weights="gossip"), self.steps, name=LOOP),
            enter,
            leave=lambda before, state, ctx: replace(before, params=state.params, hyper=state.hyper),
        )
