"""SPDB: primal and dual steps on the outer level, one inner problem per client."""

from dataclasses import replace
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import PyTree

from hyperpush.algorithms.base import BilevelState, descend
from hyperpush.algorithms.inverse import ImplicitDescent
from hyperpush.base.numbers import as_number
from hyperpush.base.ranges import Positive
from hyperpush.methods.base import MethodInfo
from hyperpush.programs import Context, Exchange, Inbox, Node
from hyperpush.task.problem import Problem


class _State(eqx.Module):
    params: PyTree
    hyper: PyTree
    dual: PyTree  # dual variable d


class SPDB(ImplicitDescent):
    """Stochastic primal-dual bilevel optimization: hypers agree through a dual variable.

    Each client has its own params y_i; the hypers x_i become common. Client i has the inner cost g_i and the outer
    cost F_i, with H_i = ∂²_yy g_i and J_i = ∂²_xy g_i. Its hypergradient is h_i = ∂_xF_i − J_i H_i⁻¹ ∂_yF_i. L = I − W
    is the Laplacian of the gossip weights, and d the dual variable (Lu et al. 2022):

        y⁺ = y − β ∂_y g_i(x, y),   x⁺ = x − α(h_i(x, y⁺) + d + ρLx),   d⁺ = d + ρLx⁺

    This is descent on the augmented Lagrangian of min Σ_i F_i with Lx = 0; d is 0 at the start.

    **Use it** on undirected networks where messages must be small: only hypers are sent. **Avoid it** where the inner
    solution must be common: it ends at x_L, where the mean of the h_i is zero.

    Departures from the paper:

    1. `inverse` is conjugate gradients on all examples by default, which adds no noise.

    Args:
        steps: Iterations, one round of gossip each. With 0 all values stay as they are.
        outer_step_size: α, above 0; a number or a schedule by iteration. Keep it below about 1/ρ.
        inner_step_size: β, above 0; a number or a schedule by iteration. Constant steps need β < 2/λ_max(H_i).
        penalty: ρ, above 0. Larger values make hypers agree sooner and need a smaller α.
        inverse: Method that applies H_i⁻¹: `ConjugateGradients(steps)` or `Neumann(terms, step_size)`.
        batch_size: Examples per estimate, drawn anew each time; None uses all. A number needs `inverse=Neumann(…)`.

    Raises:
        InvalidInput: An option is out of range; the message names it and what is allowed.

    Example:
        >>> import hyperpush as hp
        >>> from hyperpush.tasks.quadratic import outer_fixed_points
        >>> task = hp.tasks.quadratic(4, seed=0, common=True)
        >>> method = hp.algorithms.SPDB(steps=600, outer_step_size=0.15, inner_step_size=0.2, penalty=0.8)
        >>> found = hp.solve(task, method, hp.networks.Ring(4), key=0)
        >>> bool(abs(found.hypers - outer_fixed_points(task.train, task.validation)["x_L"]).max() < 1e-3)
        True
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

    penalty: Positive = eqx.field(converter=as_number, default=1.0)

    def program(self, problem: Problem) -> Node:
        def enter(state: BilevelState, ctx: Context) -> _State:
            return _State(state.params, state.hyper, optax.tree.zeros_like(state.hyper))

        def receive(state: _State, inbox: Inbox, ctx: Context) -> _State:
            below, above = (replace(ctx, key=key) for key in jax.random.split(ctx.key))
            outer_rate, inner_rate = self.rates(ctx.round)
            slope = self.inner_gradient(problem, state.params, state.hyper, below)
            params = descend(state.params, slope, inner_rate)
            own = self.own_hypergradient(problem, params, state.hyper, above)
            apart = jax.tree.map(lambda x, mixed: self.penalty * (x - mixed), state.hyper, inbox.mix(state.hyper))
            # One message serves both steps: `apart` is also ρLx⁺ of the previous iteration, if there was one.
            dual = jax.tree.map(lambda d, a: jnp.where(ctx.round > 0, d + a, d), state.dual, apart)
            along = jax.tree.map(lambda h, d, a: h + d + a, own, dual, apart)
            return _State(params, descend(state.hyper, along, outer_rate), dual)

        return self.iterate(Exchange(lambda state, ctx: state.hyper, receive, weights="gossip"), enter)
