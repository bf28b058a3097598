"""SPDB: primal and dual steps on the outer level, every client's inner problem its own."""

from dataclasses import replace
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from hyperpush.bilevel.algorithm import LOOP, Bilevel
from hyperpush.bilevel.inverse import ConjugateGradients, Inverse, check_estimates, down, own_estimate
from hyperpush.bilevel.steps import Step, check_step, step_at
from hyperpush.checks import positive, whole
from hyperpush.data.batches import draw
from hyperpush.estimators.state import Declaration
from hyperpush.problem import Problem
from hyperpush.program import Context, Exchange, Inbox, Node, Repeat, Within


class _State(eqx.Module):
    params: PyTree
    hyper: PyTree
    dual: PyTree  # d


class SPDB(eqx.Module):
    """y⁺ = y − β∂_y g_i(x, y),  x⁺ = x − α(h_i(x, y⁺) + d + ρLx),  d⁺ = d + ρLx⁺, with the own hyper-gradient h_i.

    Descent on the augmented Lagrangian of min Σ_i F_i with Lx = 0: x are the hypers and y the params of a client, g its
    inner cost, L = I − W the Laplacian of the gossip weights, d = 0 at the start. α is `outer_step`, β `inner_step` and
    ρ `penalty`.
    Lu, Cui, Squillante, Kingsbury, Horesh 2022.
    """

    declares: ClassVar[Declaration] = Declaration(
        network="undirected",
        target="local: the mean of own hyper-gradients at own inner solutions",
        sends="hypers",
        matrices=False,
        paper="Lu et al., Decentralized bilevel optimization for personalized client learning",
        needs="undirected",
        fixed_point="x_L",
    )

    iterations: int = eqx.field(static=True)
    outer_step: Step = eqx.field(static=True)
    inner_step: Step = eqx.field(static=True)
    penalty: float = eqx.field(static=True, converter=float, default=1.0)
    inverse: Inverse = ConjugateGradients()
    batch: int | None = eqx.field(static=True, default=None)

    def __check_init__(self):
        whole("SPDB.iterations", self.iterations, least=0)
        check_step("SPDB.outer_step", self.outer_step)
        check_step("SPDB.inner_step", self.inner_step)
        positive("SPDB.penalty", self.penalty)
        check_estimates("SPDB", self.inverse, self.batch)

    def program(self, problem: Problem) -> Node:
        def enter(state: Bilevel, ctx: Context) -> _State:
            return _State(state.params, state.hyper, jax.tree.map(jnp.zeros_like, state.hyper))

        def receive(state: _State, inbox: Inbox, ctx: Context) -> _State:
            below, above = jax.random.split(ctx.key)
            slope = problem.inner_gradient(state.params, state.hyper, draw(ctx.data.inner, self.batch, below))
            params = down(state.params, slope, step_at(self.inner_step, ctx.round))
            own = own_estimate(problem, self.inverse, params, state.hyper, ctx.data, self.batch, above)
            apart = jax.tree.map(lambda x, mixed: self.penalty * (x - mixed), state.hyper, inbox.mix(state.hyper))
            # One message serves both: this is ρLx⁺ of the iteration before, of which the first has none.
            dual = jax.tree.map(lambda d, a: jnp.where(ctx.round > 0, d + a, d), state.dual, apart)
            along = jax.tree.map(lambda h, d, a: h + d + a, own, dual, apart)
            return _State(params, down(state.hyper, along, step_at(self.outer_step, ctx.round)), dual)

        return Within(
            Repeat(Exchange(lambda state, ctx: state.hyper, receive, weights="gossip"), self.iterations, name=LOOP),
            enter,
            leave=lambda before, state, ctx: replace(before, params=state.params, hyper=state.hyper),
        )
