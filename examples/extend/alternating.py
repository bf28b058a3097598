"""A bilevel algorithm outside the package: one loop that updates params and personal hypers in turn."""

from dataclasses import replace
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp

from hyperpush import extend, programs


class _State(eqx.Module):
    params: object
    hyper: object
    mass: jax.Array  # push-sum's weight ω


class Alternating(extend.Algorithm):
    """Alternate one push-sum step on the params with one hypergradient step on the personal hypers."""

    # z ← P(z − γ ∂_x f_i(x_i, λ_i)), x = z/ω;  λ_i ← λ_i − α (∂_λ F_i − γ B_i ∂_x F_i), with step sizes γ and α
    info: ClassVar[extend.MethodInfo] = extend.MethodInfo(
        network="any",
        target="direct",
        sends="one vector of the size of the params, and one number, per round",
        paper="an example",
        stable=False,
        example={"steps": 10, "inner_step_size": 0.1, "outer_step_size": 0.1},
    )

    steps: extend.Whole = eqx.field(static=True)
    inner_step_size: extend.Positive
    outer_step_size: extend.Positive

    def program(self, problem: extend.Problem) -> programs.Node:
        def move(tree, along, size):
            return jax.tree.map(lambda at, slope: at - size * slope, tree, along)

        def send(state, ctx):
            gradient = problem.inner_gradient(state.params, state.hyper, extend.full_batch(ctx.data.train))
            z = jax.tree.map(lambda x: state.mass * x, move(state.params, gradient, self.inner_step_size))
            return z, state.mass

        def receive(state, inbox, ctx):
            z, mass = inbox.mix(send(state, ctx))
            params = jax.tree.map(lambda leaf: leaf / mass, z)
            along_x, along_hyper = problem.outer_gradients(params, state.hyper, extend.full_batch(ctx.data.outer))
            train = extend.full_batch(ctx.data.train)
            term = problem.jacobian_product(params, state.hyper, train, along_x)
            hyper = move(state.hyper, move(along_hyper, term, self.inner_step_size), self.outer_step_size)
            return _State(params, hyper, mass)

        round_ = programs.Exchange(send, receive, conserved=True)
        return programs.Scope(
            programs.Repeat(round_, self.steps, name=self.loop),
            enter=lambda state, ctx: _State(state.params, state.hyper, jnp.ones(())),
            leave=lambda before, state, ctx: replace(before, params=state.params, hyper=state.hyper),
        )
