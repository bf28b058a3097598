"""Iterative differentiation in forward mode: derivatives that travel along with SGP."""

from dataclasses import replace
from typing import ClassVar

import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from hyperpush.hypergradients.base import HypergradientState
from hyperpush.hypergradients.itd import IterativeDifferentiation, SGPRun, sources
from hyperpush.inner.sgp import SGP
from hyperpush.method import MethodInfo
from hyperpush.problem import Problem
from hyperpush.programs import Context, Node, Scope, Sequence, Server


class ITDForward(IterativeDifferentiation):
    """Iterative differentiation in forward mode: derivatives that travel along with the steps of SGP.

    The result is the derivative of F̄(x(T), λ), where x(T) is what `solver`'s T steps make of the given params. Every
    client carries U_i = dz_i/dλ, by the hypers of all clients, and pushes it together with z_i and ω_i. From U = 0,
    with G_i = H_i U_i/ω_i + B_iᵀ dλ_i/dλ, all links, weights and mini-batches as they are in that step,

        gradient-first:  U ← P(U − γG)        gradient-after:  U ← PU − γG

    In the end the sum of all U_iᵀ(1/n)∂_xF_i/ω_i is taken, and each client adds (1/n)∂_λF_i to its part (appendix H of
    "Personalized decentralized bilevel optimization over stochastic and directed networks").

    **Use it** on small problems with few hypers, or to compare with: nothing is recorded. **Avoid it** elsewhere: U_i,
    which is kept and sent, has n·d_λ·d numbers.

    Departures from the paper:
        1. A server takes the sum in the end.
        2. Both variants of SGP, schedules and mini-batches are covered.

    Args:
        solver: The steps to differentiate: an `SGP` of at least 1 step, with a step size and no optimizer.

    Raises:
        InvalidInput: An option is out of range; the message names it and what is allowed.

    Example:
        It is the same derivative as that of `ITDBackward`.

        >>> import hyperpush as hp
        >>> task, network = hp.tasks.quadratic(3, seed=0), hp.networks.RandomDirected(3)
        >>> sgp = hp.SGP(steps=10, step_size=0.2)
        >>> one = hp.hypergradient(task, hp.hypergradients.ITDForward(sgp), network, key=0).value
        >>> other = hp.hypergradient(task, hp.hypergradients.ITDBackward(sgp), network, key=0).value
        >>> bool(abs(one - other).max() < 1e-4)
        True
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

    def program(self, problem: Problem) -> Node:
        def start(state: HypergradientState, ctx: Context) -> SGPRun:
            inputs = ctx.clients * ravel_pytree(state.hyper)[0].size
            nothing = jax.tree.map(lambda x: jnp.zeros((inputs, *x.shape), x.dtype), state.params)
            return SGPRun(state.params, jnp.ones(()), state.hyper, ctx.key, tangents=nothing)

        def descend(run: SGPRun, ctx: Context) -> tuple[PyTree, PyTree]:
            step_size, batch = self.step_size_and_batch(run.key, ctx.round, ctx)
            gradient, derivative = jax.linearize(
                lambda x, hyper: problem.inner_gradient(x, hyper, batch), run.params, run.hyper
            )
            flat, back = ravel_pytree(run.hyper)
            inputs = jnp.arange(ctx.clients * flat.size)
            own = inputs[:, None] == ctx.client * flat.size + jnp.arange(flat.size)
            along_x = jax.tree.map(lambda u: (u / run.mass).astype(u.dtype), run.tangents)
            along = jax.vmap(derivative)(along_x, jax.vmap(back)(own.astype(flat.dtype)))
            return optax.tree.scale(-step_size, (gradient, along))

        def send(run: SGPRun, ctx: Context) -> Float[Array, " inputs"]:
            source = ravel_pytree(sources(problem, run, ctx)[0])[0]
            return jax.vmap(lambda u: ravel_pytree(u)[0])(run.tangents) @ source

        def add_up(parts: Float[Array, "n inputs"], key: PRNGKeyArray) -> Float[Array, "n size"]:
            return jnp.sum(parts, axis=0).reshape(parts.shape[0], -1)

        def receive(run: SGPRun, part: Float[Array, " size"], ctx: Context) -> HypergradientState:
            flat, back = ravel_pytree(sources(problem, run, ctx)[1])
            return HypergradientState(run.params, run.hyper, back(flat + part))

        def finish(before: HypergradientState, found: HypergradientState, ctx: Context) -> HypergradientState:
            return replace(before, params=found.params, value=found.value)

        return Scope(Sequence(self.run_program(descend), Server(send, add_up, receive)), start, finish)
