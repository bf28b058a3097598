"""MA-DSBO: a product with the inverse Hessian by gradient tracking, and a moving average of hyper-gradients."""

from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, PyTree

from hyperpush.bilevel.nested import Nested, NestedState
from hyperpush.bilevel.steps import Step, check_step, step_at
from hyperpush.data.batches import draw
from hyperpush.estimators.state import Declaration
from hyperpush.problem import Problem
from hyperpush.program import Context


class MADSBO(Nested):
    """y by gossip, z ≈ H̄^{-1} ∂_y f̄ by gradient tracking, then x along a moving average r of ∂_x f_i − J_i z.

        inner_rounds ×    y ← Wy − β∂_y g_i(x, y)
        product_rounds ×  z⁺ = Wz − γd,  d⁺ = Wd + s_i(z⁺) − s_i(z),  s_i(z) = H_i z − ∂_y f_i
        then              r ← (1 − θ)r + θ(∂_x f_i − J_i z),  x ← Wx − αr

    x are the hypers and y the params of a client, f its outer and g its inner cost, H_i = ∂²_yy g_i, J_i = ∂²_xy g_i; W
    is doubly stochastic, θ = `averaging`. d starts from the own s_i(z) in every iteration, z goes on from where it
    was. Only vectors are sent. Chen, Huang, Ma, Balasubramanian 2023. Constant steps leave an error of their order
    between unlike clients.

    `tracked` leaves none: y and x follow trackers of their mean gradients too, all in the form v ← W(v − γd), and no
    tracker starts anew, so that one round of each per iteration is enough. Steps and θ are numbers or schedules by
    iteration. Each estimate has a mini-batch of its own (`batch`; None: all examples).
    """

    declares: ClassVar[Declaration] = Declaration(
        network="undirected",
        target="global: everybody's mean outer cost",
        sends="params, hypers, and two vectors of the size of the params",
        matrices=False,
        paper="Chen et al., Decentralized stochastic bilevel optimization with improved per-iteration complexity",
        needs="undirected",
        fixed_point="x_G",
    )

    averaging: Step = eqx.field(static=True, default=0.5)

    def __check_init__(self):
        check_step("MADSBO.averaging", self.averaging)

    def weight(self, iteration: Int[Array, ""]) -> Any:
        return step_at(self.averaging, iteration)

    def unsolved(self, params: PyTree, hyper: PyTree) -> PyTree:
        return jax.tree.map(jnp.zeros_like, params)

    def residual(self, problem: Problem, state: NestedState, ctx: Context) -> PyTree:
        first, second = jax.random.split(ctx.key)
        batch = draw(ctx.data.inner, self.batch, first)
        product = problem.hessian_product(state.params, state.hyper, batch, state.solution)
        along_y, _ = problem.outer_gradients(state.params, state.hyper, draw(ctx.data.outer, self.batch, second))
        return jax.tree.map(jnp.subtract, product, along_y)

    def hypergradient(self, problem: Problem, state: NestedState, ctx: Context) -> PyTree:
        first, second = jax.random.split(ctx.key)
        _, along_x = problem.outer_gradients(state.params, state.hyper, draw(ctx.data.outer, self.batch, first))
        batch = draw(ctx.data.inner, self.batch, second)
        product = problem.jacobian_product(state.params, state.hyper, batch, state.solution)
        return jax.tree.map(jnp.subtract, along_x, product)
