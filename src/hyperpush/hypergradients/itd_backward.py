"""Iterative differentiation in backward mode: through a recorded run of SGP, from its end."""

from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from hyperpush.hypergradients.base import HypergradientEstimator, HypergradientState
from hyperpush.hypergradients.itd import Run, check_solver, run_program, sources, step_size_and_batch
from hyperpush.inner.sgp import SGP
from hyperpush.method import MethodInfo
from hyperpush.problem import Problem
from hyperpush.programs import Context, Inbox, Local, Node, Repeat, Scope, Sequence, Server


class _Tape(eqx.Module):
    """What a client keeps of a step, or of all of them."""

    params: PyTree  # x
    mass: Float[Array, "*steps"]  # ω
    sent: Float[Array, "*steps n"]  # the weights it pushed with, its own at its own place


class _Kept(eqx.Module):
    tape: _Tape
    u: PyTree
    value: PyTree  # v


class ITDBackward(HypergradientEstimator):
    """Iterative differentiation in backward mode: back through a recorded run of SGP.

    The result is the derivative of F̄(x(T), λ), where x(T) is what `solver`'s T steps make of the given params. Links,
    weights ω and mini-batches of the run are part of the function. From u = (1/n)∂_xF_i/ω_i, v = (1/n)∂_λF_i, for
    t = T − 1, …, 0 with m_i = Σ_j P[j, i] u_j, all as they were in step t:

        gradient-first:  v ← v − γB_i m_i,  u ← m_i − γ/ω_i H_i m_i
        gradient-after:  v ← v − γB_i u_i,  u ← m_i − γ/ω_i H_i u_i

    (appendix H of "Personalized decentralized bilevel optimization over stochastic and directed networks"). The links
    of SGP are gone on the way back, and messages would have to run against them: a server mixes.

    **Use it** if training is short, or to compare with. **Avoid it** for long runs: each client keeps T(d + n) numbers.
    In `hp.solve` the run starts where the inner solver has ended.

    Args:
        solver: The steps to differentiate: an `SGP` of at least 1 step, with a step size.

    Raises:
        InvalidInput: An option is out of range; the message names it and what is allowed.
    """

    info: ClassVar[MethodInfo] = MethodInfo(
        network="server",
        target="global",
        sends="what SGP sends, then per step a vector of the size of the params and n weights",
        paper="Personalized decentralized bilevel optimization over stochastic and directed networks",
        note="through the steps that SGP took",
        example={"solver": SGP(steps=10, step_size=0.1)},
    )

    trains: ClassVar[bool] = True

    solver: SGP

    def __check_init__(self):
        check_solver("ITDBackward", self.solver)

    def program(self, problem: Problem) -> Node:
        solver, steps = self.solver, self.solver.steps

        def enter(state: HypergradientState, ctx: Context):
            rows = jax.tree.map(lambda x: jnp.zeros((steps, *x.shape), x.dtype), state.params)
            tape = _Tape(rows, jnp.zeros(steps), jnp.zeros((steps, ctx.clients)))
            kept = _Kept(tape, *jax.tree.map(jnp.zeros_like, (state.params, state.hyper)))
            return Run(state.params, jnp.ones(()), state.hyper, ctx.key, kept=kept)

        def change(run: Run, ctx: Context):
            step_size, batch = step_size_and_batch(solver, run.key, ctx.round, ctx)
            gradient = problem.inner_gradient(run.params, run.hyper, batch)
            return jax.tree.map(lambda g: -step_size * g, gradient), None

        def record(run: Run, inbox: Inbox, ctx: Context):
            assert inbox.sent is not None
            sent = jnp.where(jnp.arange(ctx.clients) == ctx.client, inbox.own, inbox.sent)
            now = _Tape(run.params, run.mass, sent)
            tape = jax.tree.map(lambda rows, row: rows.at[ctx.round].set(row), run.kept.tape, now)
            return _Kept(tape, run.kept.u, run.kept.value)

        def turn(run: Run, ctx: Context):
            return run.keep(_Kept(run.kept.tape, *sources(problem, run, ctx)))

        def send(run: Run, ctx: Context):
            return run.kept.u, run.kept.tape.sent[steps - 1 - ctx.round]

        def mix(messages: tuple[PyTree, Float[Array, "n n"]], key: PRNGKeyArray):
            vectors, sent = messages
            precise = jax.lax.Precision.HIGHEST
            return jax.tree.map(lambda u: jnp.tensordot(sent, u, 1, precision=precise).astype(u.dtype), vectors)

        def receive(run: Run, mixed: PyTree, ctx: Context):
            kept, step = run.kept, steps - 1 - ctx.round
            then = jax.tree.map(lambda rows: rows[step], kept.tape)
            step_size, batch = step_size_and_batch(solver, run.key, step, ctx)
            at = mixed if solver.variant == "gradient-first" else kept.u
            along_x, along_hyper = problem.products(then.params, run.hyper, batch, at)
            u = jax.tree.map(lambda m, h: (m - step_size / then.mass * h).astype(m.dtype), mixed, along_x)
            v = jax.tree.map(lambda v, b: (v - step_size * b).astype(v.dtype), kept.value, along_hyper)
            return run.keep(_Kept(kept.tape, u, v))

        way_back = Repeat(Server(send, mix, receive), steps, name="ITDBackward")
        return Scope(
            Sequence(run_program(solver, change, record), Local(turn), way_back),
            enter,
            leave=lambda before, run, ctx: HypergradientState(run.params, run.hyper, run.kept.value, before.links),
        )
