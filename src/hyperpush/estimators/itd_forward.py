"""Iterative differentiation in forward mode: derivatives that travel along with SGP."""

from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, PRNGKeyArray

from hyperpush.estimators.itd import Run, check_solver, rate_and_batch, run_program, sources
from hyperpush.estimators.state import Declaration, Hyper
from hyperpush.inner.sgp import SGP
from hyperpush.problem import Problem
from hyperpush.program import Context, Node, Sequence, Server, Within


class ITDForward(eqx.Module):
    """The derivative of F̄(x(T), λ), where x(T) is what `solver`'s T steps of SGP make of the given params.

    Every client carries U_i = dz_i/dλ, by the hypers of all clients, and pushes it together with z_i and ω_i. From
    U = 0, with G_i = H_i U_i/ω_i + B_iᵀ dλ_i/dλ, all links, weights and mini-batches as they are in that step,

        gradient-first:  U ← P(U − γG)        gradient-after:  U ← PU − γG

    In the end a server adds up U_iᵀ(1/n)∂_xF_i/ω_i and gives each client its part, to which it adds (1/n)∂_λF_i.
    Appendix H of "Personalized decentralized bilevel optimization over stochastic and directed networks". Nothing is
    recorded, but U_i, which is kept and sent, has n·d_λ·d numbers: for small problems. The rate must be a number or a
    schedule.
    """

    declares: ClassVar[Declaration] = Declaration(
        network="any for SGP; a server at the end",
        target="global, through the steps that SGP took",
        sends="what SGP sends and its derivative by all clients' hypers, n·d_λ times as much",
        matrices=True,
        paper="Personalized decentralized bilevel optimization over stochastic and directed networks",
    )

    solver: SGP = eqx.field(static=True)

    def __check_init__(self):
        check_solver("ITDForward", self.solver)

    def program(self, problem: Problem) -> Node:
        solver = self.solver

        def enter(state: Hyper, ctx: Context):
            inputs = ctx.clients * ravel_pytree(state.hyper)[0].size
            nothing = jax.tree.map(lambda x: jnp.zeros((inputs, *x.shape), x.dtype), state.params)
            return Run(state.params, jnp.ones(()), state.hyper, ctx.key, tangents=nothing)

        def change(run: Run, ctx: Context):
            rate, batch = rate_and_batch(solver, run.key, ctx.round, ctx)
            gradient, derivative = jax.linearize(
                lambda x, hyper: problem.inner_gradient(x, hyper, batch), run.params, run.hyper
            )
            flat, back = ravel_pytree(run.hyper)
            inputs = jnp.arange(ctx.clients * flat.size)
            own = inputs[:, None] == ctx.client * flat.size + jnp.arange(flat.size)
            along_x = jax.tree.map(lambda u: (u / run.mass).astype(u.dtype), run.tangents)
            along = jax.vmap(derivative)(along_x, jax.vmap(back)(own.astype(flat.dtype)))
            return jax.tree.map(lambda g: -rate * g, (gradient, along))

        def send(run: Run, ctx: Context):
            source = ravel_pytree(sources(problem, run, ctx)[0])[0]
            return jax.vmap(lambda u: ravel_pytree(u)[0])(run.tangents) @ source

        def add_up(parts: Float[Array, "n inputs"], key: PRNGKeyArray):
            return jnp.sum(parts, axis=0).reshape(parts.shape[0], -1)

        def receive(run: Run, part: Float[Array, " size"], ctx: Context):
            _, direct = sources(problem, run, ctx)
            flat, back = ravel_pytree(direct)
            return Hyper(run.params, run.hyper, back(flat + part))

        return Within(
            Sequence(run_program(solver, change), Server(send, add_up, receive)),
            enter,
            leave=lambda before, found, ctx: Hyper(found.params, found.hyper, found.value, before.links),
        )
