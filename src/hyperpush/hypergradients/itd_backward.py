"""Iterative differentiation in backward mode: through a recorded run of SGP, from its end."""

from dataclasses import replace
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from hyperpush.hypergradients.base import HypergradientState
from hyperpush.hypergradients.itd import IterativeDifferentiation, SGPRun, sources
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


class ITDBackward(IterativeDifferentiation):
    """Iterative differentiation in backward mode: back through a recorded run of SGP.

    The result is the derivative of F̄(x(T), λ), where x(T) is what `solver`'s T steps make of the given params. Links,
    weights ω and mini-batches of the run are part of the function. From u = (1/n)∂_xF_i/ω_i, v = (1/n)∂_λF_i, for
    t = T − 1, …, 0 with m_i = Σ_j P[j, i] u_j, all as they were in step t:

        gradient-first:  v ← v − γB_i m_i,  u ← m_i − γ/ω_i H_i m_i
        gradient-after:  v ← v − γB_i u_i,  u ← m_i − γ/ω_i H_i u_i

    (appendix H of "Personalized decentralized bilevel optimization over stochastic and directed networks").

    **Use it** if training is short, or to compare with: it needs neither convexity nor a solved inner problem.
    **Avoid it** for long runs: each client keeps T(d + n) numbers. In `hp.solve` the run starts where the inner solver
    has ended.

    Departures from the paper:
        1. The links of SGP are gone on the way back, and messages would have to run against them: a server mixes.
        2. Both variants of SGP, schedules and mini-batches are covered.

    Args:
        solver: The steps to differentiate: an `SGP` of at least 1 step, with a step size and no optimizer.

    Raises:
        InvalidInput: An option is out of range; the message names it and what is allowed.

    Example:
        A long run ends at the inner solution, where the closed form holds.

        >>> import hyperpush as hp
        >>> task, network = hp.tasks.quadratic(5, seed=0), hp.networks.FullyConnected(5)
        >>> sgp = hp.SGP(steps=200, step_size=0.2)
        >>> found = hp.hypergradient(task, hp.hypergradients.ITDBackward(sgp), network, key=0).value
        >>> solved = hp.train(task, sgp, network, key=0).task
        >>> exact = hp.hypergradient(solved, hp.hypergradients.Dense(), network, key=0).value
        >>> bool(abs(found - exact).max() < 1e-4)
        True
    """

    info: ClassVar[MethodInfo] = MethodInfo(
        network="server",
        target="global",
        sends="what SGP sends, then per step a vector of the size of the params and n weights",
        paper="Personalized decentralized bilevel optimization over stochastic and directed networks",
        note="through the steps that SGP took",
        example={"solver": SGP(steps=10, step_size=0.1)},
    )

    def program(self, problem: Problem) -> Node:
        steps = self.solver.steps

        def start(state: HypergradientState, ctx: Context) -> SGPRun:
            rows = jax.tree.map(lambda x: jnp.zeros((steps, *x.shape), x.dtype), state.params)
            tape = _Tape(rows, jnp.zeros(steps), jnp.zeros((steps, ctx.clients)))
            kept = _Kept(tape, *optax.tree.zeros_like((state.params, state.hyper)))
            return SGPRun(state.params, jnp.ones(()), state.hyper, ctx.key, kept=kept)

        def descend(run: SGPRun, ctx: Context) -> tuple[PyTree, None]:
            step_size, batch = self.step_size_and_batch(run.key, ctx.round, ctx)
            return optax.tree.scale(-step_size, problem.inner_gradient(run.params, run.hyper, batch)), None

        def record(run: SGPRun, inbox: Inbox, ctx: Context) -> _Kept:
            assert inbox.sent is not None
            sent = jnp.where(jnp.arange(ctx.clients) == ctx.client, inbox.own, inbox.sent)
            now = _Tape(run.params, run.mass, sent)
            tape = jax.tree.map(lambda rows, row: rows.at[ctx.round].set(row), run.kept.tape, now)
            return replace(run.kept, tape=tape)

        def turn(run: SGPRun, ctx: Context) -> SGPRun:
            return replace(run, kept=_Kept(run.kept.tape, *sources(problem, run, ctx)))

        def send(run: SGPRun, ctx: Context):
            return run.kept.u, run.kept.tape.sent[steps - 1 - ctx.round]

        def mix(messages: tuple[PyTree, Float[Array, "n n"]], key: PRNGKeyArray) -> PyTree:
            vectors, sent = messages
            precise = jax.lax.Precision.HIGHEST
            return jax.tree.map(lambda u: jnp.tensordot(sent, u, 1, precision=precise).astype(u.dtype), vectors)

        def receive(run: SGPRun, mixed: PyTree, ctx: Context) -> SGPRun:
            kept, step = run.kept, steps - 1 - ctx.round
            then = jax.tree.map(lambda rows: rows[step], kept.tape)
            step_size, batch = self.step_size_and_batch(run.key, step, ctx)
            at = mixed if self.solver.variant == "gradient-first" else kept.u
            along_x, along_hyper = problem.products(then.params, run.hyper, batch, at)
            u = jax.tree.map(lambda m, h: (m - step_size / then.mass * h).astype(m.dtype), mixed, along_x)
            v = jax.tree.map(lambda v, b: (v - step_size * b).astype(v.dtype), kept.value, along_hyper)
            return replace(run, kept=_Kept(kept.tape, u, v))

        def finish(before: HypergradientState, run: SGPRun, ctx: Context) -> HypergradientState:
            return replace(before, params=run.params, value=run.kept.value)

        way_back = Repeat(Server(send, mix, receive), steps, name="ITDBackward")
        return Scope(Sequence(self.run_program(descend, record), Local(turn), way_back), start, finish)
