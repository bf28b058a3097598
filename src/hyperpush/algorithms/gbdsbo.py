"""GBDSBO: gossip of gradients, Jacobians and Hessians."""

from dataclasses import replace
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from hyperpush.algorithms.base import BilevelState, TwoLevelDescent, descend, move_towards, track
from hyperpush.algorithms.matrices import flat_outer_gradients, second_derivatives
from hyperpush.base.errors import InvalidInput
from hyperpush.base.numbers import as_number
from hyperpush.base.ranges import OptionalCount, OptionalPositive
from hyperpush.base.schedules import Rate, step_size_at
from hyperpush.data.batches import minibatch
from hyperpush.methods.base import MethodInfo
from hyperpush.programs import Context, Exchange, Inbox, Node
from hyperpush.task.problem import Problem


class Parts(eqx.Module):
    """Derivatives that make up the hypergradient of the mean outer cost."""

    outer: Float[Array, " h"]  # s: ∂_x f
    pull: Float[Array, " d"]  # h: ∂_y f
    jacobian: Float[Array, "h d"]  # U: ∂²_xy g
    hessians: Float[Array, "b d d"]  # V: ∂²_yy g, from independent examples
    slope: PyTree  # ∂_y g; None in messages without it


class _State(eqx.Module):
    params: PyTree
    hyper: PyTree
    means: Parts  # the client's estimates of the mean derivatives
    own: Parts  # the client's own derivatives


class GBDSBO(TwoLevelDescent):
    """Gossip-based decentralized stochastic bilevel optimization: gradients, Jacobians and Hessians by gossip.

    Clients share the hypers x and the params y. Client i has the outer cost f_i and the inner cost g_i; W holds doubly
    stochastic gossip weights. Each client keeps estimates (s, h, U, V) of the means of ∂_x f_i, ∂_y f_i, ∂²_xy g_i and
    ∂²_yy g_i (Yang, Zhang and Wang, arXiv:2206.10870):

        x⁺ = Wx − α(s − U V⁻¹ h),   y⁺ = Wy − γ ∂_y g_i
        (s, h, U, V)⁺ = (1 − β)W(s, h, U, V) + β(∂_x f_i, ∂_y f_i, ∂²_xy g_i, ∂²_yy g_i)(x⁺, y⁺)

    **Use it** on small models, as the reference for methods that send vectors only. **Avoid it** on larger ones: it
    sends d×d numbers per round. If clients' costs differ, constant step sizes and a constant β leave an error of their
    order, which `tracked` removes.

    Departures from the paper:

    1. V⁻¹h is the solution of a linear system. With `estimates` and `curvature` it is the paper's series.
    2. `tracked` is not in the paper: (s, h, U, V) and ∂_y g follow the clients' mean,
       m⁺ = Wm + m_i(x⁺, y⁺) − m_i(x, y). Then y descends along the tracked ∂_y g. Both steps come before mixing,
       v⁺ = W(v − …), which allows larger steps.

    Args:
        steps: Iterations, one round of gossip each.
        outer_step_size: α, above 0; a number or a schedule by iteration. Start well below γ.
        inner_step_size: γ, above 0; a number or a schedule by iteration. Constant steps need γ < 2/λ_max(V).
        averaging: β, above 0; a number or a schedule by iteration. 1 keeps no old estimate. Unused if
            `tracked`.
        estimates: b, at least 1: number of independent averages V_l of the Hessian in the series
            V⁻¹h ≈ (1/L) Σ_{k≤b} Π_{l≤k} (I − V_l/L) h. Mini-batches add no bias to the series, but it takes b times as
            many Hessians. None solves the linear system directly.
        curvature: L of the series, above all eigenvalues of V; None solves the linear system directly.
        tracked: True follows the means of all derivatives by gradient tracking.
        batch_size: Examples per estimate; each draws its own mini-batch. None uses all.

    Raises:
        InvalidInput: An option is out of range; the message names it and what is allowed.

    Example:
        Tracked, it ends at the minimizer of the mean outer cost, x_G.

        >>> import hyperpush as hp
        >>> from hyperpush.tasks.quadratic import outer_fixed_points
        >>> task = hp.tasks.quadratic(4, seed=0, common=True)
        >>> method = hp.algorithms.GBDSBO(400, 0.1, 0.15, tracked=True)
        >>> found = hp.solve(task, method, hp.networks.Ring(4), key=0)
        >>> bool(abs(found.hypers - outer_fixed_points(task.train, task.validation)["x_G"]).max() < 1e-3)
        True
    """

    info: ClassVar[MethodInfo] = MethodInfo(
        network="undirected",
        target="global",
        sends="params, hypers, their gradients, a Jacobian and a Hessian",
        paper="Yang, Zhang and Wang, Decentralized gossip-based stochastic bilevel optimization over communication "
        "networks, arXiv:2206.10870",
        matrices=True,
        fixed_point="x_G",
        example={"steps": 3, "outer_step_size": 0.05, "inner_step_size": 0.1, "tracked": True},
    )

    averaging: Rate = eqx.field(converter=as_number, default=0.5)
    estimates: OptionalCount = eqx.field(static=True, default=None)
    curvature: OptionalPositive = eqx.field(converter=as_number, default=None)
    tracked: bool = eqx.field(static=True, default=False)
    batch_size: OptionalCount = eqx.field(static=True, default=None)

    def __check_init__(self):
        if (self.estimates is None) != (self.curvature is None):
            given = (self.estimates, self.curvature)
            raise InvalidInput("GBDSBO.estimates and curvature", given, "both for the series, or neither of them")

    def program(self, problem: Problem) -> Node:
        def parts(params: PyTree, hyper: PyTree, ctx: Context) -> Parts:
            first, second, third, key = jax.random.split(ctx.key, 4)
            pull, outer = flat_outer_gradients(
                problem, params, hyper, minibatch(ctx.data.outer, self.batch_size, first)
            )

            def matrices(key: PRNGKeyArray):
                return second_derivatives(problem, params, hyper, minibatch(ctx.data.train, self.batch_size, key))

            _, jacobian = matrices(second)
            hessians = jax.vmap(lambda key: matrices(key)[0])(jax.random.split(key, self.estimates or 1))
            slope = problem.inner_gradient(params, hyper, minibatch(ctx.data.train, self.batch_size, third))
            return Parts(outer, pull, jacobian, hessians, slope)

        def enter(state: BilevelState, ctx: Context) -> _State:
            own = parts(state.params, state.hyper, ctx)
            return _State(state.params, state.hyper, own, own)

        def step(state: _State, params: PyTree, hyper: PyTree, ctx: Context) -> tuple[PyTree, PyTree]:
            """Return (params, hyper) after a step along the client's estimates."""
            means, (outer_rate, inner_rate) = state.means, self.rates(ctx.round)
            along = means.outer - means.jacobian @ self._apply_inverse(means.hessians, means.pull)
            slope = means.slope if self.tracked else state.own.slope
            return descend(params, slope, inner_rate), descend(hyper, ravel_pytree(hyper)[1](along), outer_rate)

        def send(state: _State, ctx: Context) -> PyTree:
            if self.tracked:
                return *step(state, state.params, state.hyper, ctx), state.means
            # Without tracking, ∂_y g is not averaged, so it is not sent.
            return state.params, state.hyper, replace(state.means, slope=None)

        def receive(state: _State, inbox: Inbox, ctx: Context) -> _State:
            params, hyper, mixed = inbox.mix(send(state, ctx))
            if self.tracked:
                own = parts(params, hyper, ctx)
                return _State(params, hyper, track(mixed, own, state.own), own)
            params, hyper = step(state, params, hyper, ctx)
            own = parts(params, hyper, ctx)
            means = move_towards(replace(mixed, slope=own.slope), own, step_size_at(self.averaging, ctx.round))
            return _State(params, hyper, means, own)

        return self.iterate(Exchange(send, receive, weights="gossip"), enter)

    def _apply_inverse(self, hessians: Float[Array, "b d d"], vector: Float[Array, " d"]) -> Float[Array, " d"]:
        curvature = self.curvature
        if curvature is None:
            return jnp.linalg.solve(hessians[0], vector)

        def term(total, hessian):
            return vector + total - hessian @ total / curvature, None

        return jax.lax.scan(term, vector, hessians)[0] / curvature
