"""DSBO-JHIP: the product of Jacobian and inverse Hessian as a matrix that clients find together."""

from typing import ClassVar

import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, PyTree

from hyperpush.bilevel.matrices import flat_outer_gradients, second_derivatives
from hyperpush.bilevel.nested import Nested, NestedState
from hyperpush.data.batches import draw
from hyperpush.estimators.state import Declaration
from hyperpush.problem import Problem
from hyperpush.program import Context


class DSBOJHIP(Nested):
    """y by gossip, Z ≈ J̄ H̄^{-1} by gradient tracking, then x along ∂_x f_i − Z_i ∂_y f_i.

        inner_rounds ×    y ← Wy − β∂_y g_i(x, y)
        product_rounds ×  Z⁺ = WZ − γD,  D⁺ = WD + G_i(Z⁺) − G_i(Z),  G_i(Z) = Z H_i − J_i
        then              x ← Wx − α(∂_x f_i − Z ∂_y f_i)

    x are the hypers and y the params of a client, f its outer and g its inner cost, H_i = ∂²_yy g_i, J_i = ∂²_xy g_i; W
    is doubly stochastic. D starts from the own G_i(Z) in every iteration, Z goes on from where it was. Chen, Huang,
    Ma 2022. Constant steps leave an error of their order between unlike clients.

    `tracked` leaves none: y and x follow trackers of their mean gradients too, all in the form v ← W(v − γd), and no
    tracker starts anew, so that one round of each per iteration is enough. Steps are numbers or schedules by
    iteration. Each estimate has a mini-batch of its own (`batch`; None: all examples).
    """

    declares: ClassVar[Declaration] = Declaration(
        network="undirected",
        target="client: own outer cost at the common inner solution",
        sends="params, hypers, and twice a matrix of params × hypers",
        matrices=True,
        paper="Chen, Huang and Ma, Decentralized bilevel optimization",
        needs="undirected",
        fixed_point="x_G",
    )

    def unsolved(self, params: PyTree, hyper: PyTree) -> Float[Array, "h d"]:
        flat = ravel_pytree(params)[0]
        return jnp.zeros((ravel_pytree(hyper)[0].size, flat.size), flat.dtype)

    def residual(self, problem: Problem, state: NestedState, ctx: Context) -> Float[Array, "h d"]:
        batch = draw(ctx.data.inner, self.batch, ctx.key)
        hessian, jacobian = second_derivatives(problem, state.params, state.hyper, batch)
        return state.solution @ hessian - jacobian

    def hypergradient(self, problem: Problem, state: NestedState, ctx: Context) -> PyTree:
        batch = draw(ctx.data.outer, self.batch, ctx.key)
        along_y, along_x = flat_outer_gradients(problem, state.params, state.hyper, batch)
        return ravel_pytree(state.hyper)[1](along_x - state.solution @ along_y)
