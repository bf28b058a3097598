"""Iterative differentiation in forward mode: derivatives that travel along with SGP."""

from typing import ClassVar

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, PRNGKeyArray

from hyperpush.hypergradients.base import HypergradientEstimator, HypergradientState
from hyperpush.hypergradients.itd import Run, check_solver, run_program, sources, step_size_and_batch
from hyperpush.inner.sgp import SGP
from hyperpush.method import MethodInfo
from hyperpush.problem import Problem
from hyperpush.programs import Context, Node, Scope, Sequence, Server


class ITDForward(HypergradientEstimator):
    """Iterative differentiation in forward mode: derivatives that travel along with the steps of SGP.

    The result is the derivative of F̄(x(T), λ), where x(T) is what `solver`'s T steps make of the given params. Every
    client carries U_i = dz_i/dλ, by the hypers of all clients, and pushes it together with z_i and ω_i. From U = 0,
    with G_i = H_i U_i/ω_i + B_iᵀ dλ_i/dλ, all links, weights and mini-batches as they are in that step,

        gradient-first:  U ← P(U − γG)        gradient-after:  U ← PU − γG

    In the end a server adds up U_iᵀ(1/n)∂_xF_i/ω_i and gives each client its part, to which it adds (1/n)∂_λF_i
    (appendix H of "Personalized decentralized bilevel optimization over stochastic and directed networks").

    **Use it** on small problems with few hypers, or to compare with: nothing is recorded. **Avoid it** elsewhere: U_i,
    which is kept and sent, has n·d_λ·d numbers.

    Args:
        solver: The steps to differentiate: an `SGP` of at least 1 step, with a step size.

    Raises:
        InvalidInput: An option is out of range; the message names it and what is allowed.
    """

    info: ClassVar[MethodInfo] = MethodInfo(
        network="server",
        target="global",
        sends="what SGP sends and its derivative by all clients' hypers, n·d_λ times as much",
        matrices=True,
        paper="Personalized decentralized bilevel optimization over stochastic and directed networks",
        note="through the steps that SGP took",
        example={"solver": SGP(steps=10, step_size=0.1)},
    )

    trains: ClassVar[bool] = True

    solver: SGP

    def __check_init__(self):
        check_solver("ITDForward", self.solver)

    def program(self, problem: Problem) -> Node:
        solver = self.solver

        def enter(state: HypergradientState, ctx: Context):
            inputs = ctx.clients * ravel_pytree(state.hyper)[0].size
            nothing = jax.tree.map(lambda x: jnp.zeros((inputs, *x.shape), x.dtype), state.params)
            return Run(state.params, jnp.ones(()), state.hyper, ctx.key, tangents=nothing)

        def change(run: Run, ctx: Context):
            step_size, batch = step_size_and_batch(solver, run.key, ctx.round, ctx)
            gradient, derivative = jax.linearize(
                lambda x, hyper: problem.inner_gradient(x, hyper, batch), run.params, run.hyper
            )
            flat, back = ravel_pytree(run.hyper)
            inputs = jnp.arange(ctx.clients * flat.size)
            own = inputs[:, None] == ctx.client * flat.size + jnp.arange(flat.size)
            along_x = jax.tree.map(lambda u: (u / run.mass).astype(u.dtype), run.tangents)
            along = jax.vmap(derivative)(along_x, jax.vmap(back)(own.astype(flat.dtype)))
            return jax.tree.map(lambda g: -step_size * g, (gradient, along))

        def send(run: Run, ctx: Context):
            source = ravel_pytree(sources(problem, run, ctx)[0])[0]
            return jax.vmap(lambda u: ravel_pytree(u)[0])(run.tangents) @ source

        def add_up(parts: Float[Array, "n inputs"], key: PRNGKeyArray):
            return jnp.sum(parts, axis=0).reshape(parts.shape[0], -1)

        def receive(run: Run, part: Float[Array, " size"], ctx: Context):
            _, direct = sources(problem, run, ctx)
            flat, back = ravel_pytree(direct)
            return HypergradientState(run.params, run.hyper, back(flat + part))

        return Scope(
            Sequence(run_program(solver, change), Server(send, add_up, receive)),
            enter,
            leave=lambda before, found, ctx: HypergradientState(found.params, found.hyper, found.value, before.links),
        )
