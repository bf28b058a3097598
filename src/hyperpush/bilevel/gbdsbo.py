"""GBDSBO: gossip of gradients, Jacobians and Hessians."""

from collections.abc import Callable
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from hyperpush.bilevel.algorithm import LOOP, Bilevel
from hyperpush.bilevel.matrices import flat_outer_gradients, second_derivatives
from hyperpush.bilevel.steps import Step, check_step, step_at
from hyperpush.checks import positive, whole, yes_or_no
from hyperpush.data.batches import draw
from hyperpush.errors import InvalidInput
from hyperpush.estimators.state import Declaration
from hyperpush.problem import Problem
from hyperpush.program import Context, Exchange, Inbox, Node, Repeat, Within


class Parts(eqx.Module):
    """What the hyper-gradient of the mean is put together from."""

    outer: Float[Array, " h"]  # s: ∂_x f
    pull: Float[Array, " d"]  # h: ∂_y f
    jacobian: Float[Array, "h d"]  # U: ∂²_xy g
    hessians: Float[Array, "b d d"]  # V: ∂²_yy g, from independent examples
    slope: Float[Array, " d"]  # ∂_y g


class _State(eqx.Module):
    params: PyTree
    hyper: PyTree
    means: Parts  # as far as the client knows them
    own: Parts


class GBDSBO(eqx.Module):
    """Everybody's mean gradients and matrices by gossip, then x along s − U V^{-1} h and y by gossip.

        x⁺ = Wx − α(s − U V^{-1} h),  y⁺ = Wy − γ∂_y g_i
        (s, h, U, V)⁺ = (1 − β)W(s, h, U, V) + β(∂_x f_i, ∂_y f_i, ∂²_xy g_i, ∂²_yy g_i)(x⁺, y⁺)

    x are the hypers and y the params of a client, f its outer and g its inner cost; W is doubly stochastic,
    β = `averaging`. Yang, Zhang, Wang 2022. V^{-1}h is solved for; or, with `estimates` = b and `curvature` = L above
    all eigenvalues of V, it is (1/L) Σ_{k≤b} Π_{l≤k} (I − V_l/L) h with b independent averages V_l, as in the paper:
    unbiased with mini-batches, at b times the Hessians. Constant steps and β leave an error of their order between
    unlike clients.

    `tracked` leaves none: (s, h, U, V) and ∂_y g follow the clients' mean, m⁺ = Wm + m_i(x⁺, y⁺) − m_i(x, y), y
    descends along the last, and both steps are taken before mixing, v⁺ = W(v − …), which bears larger ones. Steps and β
    are numbers or schedules by iteration. Each estimate has a mini-batch of its own (`batch`; None: all examples).
    """

    declares: ClassVar[Declaration] = Declaration(
        network="undirected",
        target="global: everybody's mean outer cost",
        sends="params, hypers, their gradients, a Jacobian and a Hessian",
        matrices=True,
        paper="Yang, Zhang and Wang, Decentralized gossip-based stochastic bilevel optimization",
        needs="undirected",
        fixed_point="x_G",
    )

    iterations: int = eqx.field(static=True)
    outer_step: Step = eqx.field(static=True)
    inner_step: Step = eqx.field(static=True)
    averaging: Step = eqx.field(static=True, default=0.5)
    estimates: int | None = eqx.field(static=True, default=None)
    curvature: float | None = eqx.field(static=True, default=None)
    tracked: bool = eqx.field(static=True, default=False)
    batch: int | None = eqx.field(static=True, default=None)

    def __check_init__(self):
        whole("GBDSBO.iterations", self.iterations, least=0)
        for name in ("outer_step", "inner_step", "averaging"):
            check_step(f"GBDSBO.{name}", getattr(self, name))
        if self.estimates is not None:
            whole("GBDSBO.estimates", self.estimates, least=1)
        if self.curvature is not None:
            positive("GBDSBO.curvature", self.curvature)
        if (self.estimates is None) != (self.curvature is None):
            given = (self.estimates, self.curvature)
            raise InvalidInput("GBDSBO.estimates and curvature", given, "both for the series, none to solve directly")
        yes_or_no("GBDSBO.tracked", self.tracked)
        if self.batch is not None:
            whole("GBDSBO.batch", self.batch, least=1)

    def program(self, problem: Problem) -> Node:
        def parts(params: PyTree, hyper: PyTree, ctx: Context) -> Parts:
            first, second, third, key = jax.random.split(ctx.key, 4)
            pull, outer = flat_outer_gradients(problem, params, hyper, draw(ctx.data.outer, self.batch, first))

            def matrices(key: PRNGKeyArray):
                return second_derivatives(problem, params, hyper, draw(ctx.data.inner, self.batch, key))

            _, jacobian = matrices(second)
            hessians = jax.vmap(lambda key: matrices(key)[0])(jax.random.split(key, self.estimates or 1))
            slope = problem.inner_gradient(params, hyper, draw(ctx.data.inner, self.batch, third))
            return Parts(outer, pull, jacobian, hessians, ravel_pytree(slope)[0])

        def enter(state: Bilevel, ctx: Context) -> _State:
            own = parts(state.params, state.hyper, ctx)
            return _State(state.params, state.hyper, own, own)

        def descend(state: _State, params: PyTree, hyper: PyTree, ctx: Context) -> tuple[PyTree, PyTree]:
            """A step from (params, hyper), along what the client knows."""
            means, t = state.means, ctx.round
            along = means.outer - means.jacobian @ inverse_product(means.hessians, means.pull)
            slope = means.slope if self.tracked else state.own.slope
            return moved(params, step_at(self.inner_step, t), slope), moved(hyper, step_at(self.outer_step, t), along)

        def send(state: _State, ctx: Context) -> PyTree:
            if self.tracked:
                return *descend(state, state.params, state.hyper, ctx), state.means
            # What is not averaged stays at home.
            return state.params, state.hyper, eqx.tree_at(lambda m: m.slope, state.means, None)

        def receive(state: _State, inbox: Inbox, ctx: Context) -> _State:
            params, hyper, mixed = inbox.mix(send(state, ctx))
            if not self.tracked:
                params, hyper = descend(state, params, hyper, ctx)
            own = parts(params, hyper, ctx)
            if self.tracked:
                means = jax.tree.map(lambda m, new, old: m + new - old, mixed, own, state.own)
            else:
                weight = step_at(self.averaging, ctx.round)
                mixed = eqx.tree_at(lambda m: m.slope, mixed, own.slope, is_leaf=lambda leaf: leaf is None)
                means = jax.tree.map(lambda m, new: ((1 - weight) * m + weight * new).astype(m.dtype), mixed, own)
            return _State(params, hyper, means, own)

        inverse_product = self._inverse_product()
        return Within(
            Repeat(Exchange(send, receive, weights="gossip"), self.iterations, name=LOOP),
            enter,
            leave=lambda before, state, ctx: Bilevel(state.params, state.hyper),
        )

    def _inverse_product(self) -> Callable[[Float[Array, "b d d"], Float[Array, " d"]], Float[Array, " d"]]:
        curvature = self.curvature
        if curvature is None:
            return lambda hessians, vector: jnp.linalg.solve(hessians[0], vector)

        def series(hessians: Float[Array, "b d d"], vector: Float[Array, " d"]) -> Float[Array, " d"]:
            def term(total, hessian):
                return vector + total - hessian @ total / curvature, None

            return jax.lax.scan(term, vector, hessians)[0] / curvature

        return series


def moved(at: PyTree, step, along: Float[Array, " d"]) -> PyTree:
    flat, back = ravel_pytree(at)
    return back((flat - step * along).astype(flat.dtype))
