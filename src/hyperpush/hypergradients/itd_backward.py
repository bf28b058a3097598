"""Iterative differentiation: differentiate backward through a recorded run of SGP.

One step of SGP with given links, step size γ and batch maps a small change of z and λ to

    gradient-first:  dz⁺ = P(dz − γ(H dz/ω + Bᵀdλ))         gradient-after:  dz⁺ = P dz − γ(H dz/ω + Bᵀdλ)

with H_i = ∂²_xx f_i and B_i = ∂²_λx f_i at x_i = z_i/ω_i. In the end F̄ changes by Σ_i c_iᵀdz_i + (1/n)∂_λF_iᵀdλ_i with
c_i = (1/n)∂_xF_i/ω_i. Backward mode multiplies the transposes of these maps from the last step on (Franceschi, Donini,
Frasconi and Pontil, arXiv:1703.01785).
"""

from dataclasses import replace
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, PRNGKeyArray, PyTree

from hyperpush.base.checks import check_integer
from hyperpush.base.errors import InvalidInput
from hyperpush.base.numbers import Number
from hyperpush.base.schedules import step_size_at
from hyperpush.data.batches import minibatch
from hyperpush.hypergradients.base import HypergradientEstimator, HypergradientState, outer_gradient_shares
from hyperpush.inner.sgp import SGP
from hyperpush.methods.base import MethodInfo
from hyperpush.programs import Context, Exchange, Inbox, Local, Node, Repeat, Scope, Sequence, Server
from hyperpush.task.problem import Problem


class _Tape(eqx.Module):
    """A client's record of one step of SGP, or of all steps along axis 0."""

    params: PyTree  # x
    mass: Float[Array, "*steps"]  # ω
    sent: Float[Array, "*steps n"]  # push weights by receiver; the client's own entry is the weight that it keeps


class _Run(eqx.Module):
    """A client's state during SGP and during the backward pass."""

    z: PyTree
    mass: Float[Array, ""]  # ω
    hyper: PyTree
    key: PRNGKeyArray  # draws the mini-batch of each step, so the backward pass can redraw it
    tape: _Tape
    u: PyTree
    value: PyTree  # v

    @property
    def params(self) -> PyTree:
        return jax.tree.map(lambda z: (z / self.mass).astype(z.dtype), self.z)


class ITDBackward(HypergradientEstimator):
    """Iterative differentiation in backward mode: differentiate backward through a recorded run of SGP.

    The result is the derivative of the mean outer cost F̄(x(T), λ), where x(T) are the params after the T steps of
    `solver`. The links, push-sum weights ω and mini-batches of the run are held fixed. Each client starts from
    u = (1/n)∂_xF_i/ω_i and v = (1/n)∂_λF_i. The links P, the weights ω, H_i = ∂²_xx f_i
    and B_i = ∂²_λx f_i are those of step t. For t = T − 1, …, 0 the client takes m_i = Σ_j P[j, i] u_j and updates,
    with the step size γ,

        gradient-first:  v ← v − γB_i m_i,  u ← m_i − γ/ω_i H_i m_i
        gradient-after:  v ← v − γB_i u_i,  u ← m_i − γ/ω_i H_i u_i

    (appendix H of "Personalized decentralized bilevel optimization over stochastic and directed networks").

    **Use it** for short training or as a reference: it needs neither convexity nor a solved inner problem. **Avoid it**
    for long runs: each client keeps T(d + n) numbers. In `hp.solve` the run starts from the initial params.

    Departures from the paper:
        1. A server computes the sums m_i. Messages of the backward pass run against the links of the recorded steps,
           and these links may no longer be up.
        2. Both variants of SGP, schedules and mini-batches are covered.

    Args:
        solver: The steps to differentiate: an `SGP` of at least 1 step, with a step size and without an optimizer.

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

    trains: ClassVar[bool] = True

    solver: SGP

    def __check_init__(self):
        if self.solver.optimizer is not None:
            allowed = "None: only plain SGD, given by step_size"
            raise InvalidInput("ITDBackward.solver.optimizer", self.solver.optimizer, allowed)
        check_integer("ITDBackward.solver.steps", self.solver.steps, minimum=1)

    def program(self, problem: Problem) -> Node:
        first, steps = self.solver.variant == "gradient-first", self.solver.steps

        def start(state: HypergradientState, ctx: Context) -> _Run:
            rows = jax.tree.map(lambda x: jnp.zeros((steps, *x.shape), x.dtype), state.params)
            tape = _Tape(rows, jnp.zeros(steps), jnp.zeros((steps, ctx.clients)))
            zeros = optax.tree.zeros_like((state.params, state.hyper))
            return _Run(state.params, jnp.ones(()), state.hyper, ctx.key, tape, *zeros)

        def descend(run: _Run, ctx: Context) -> tuple[_Run, PyTree]:
            step_size, batch = self._step_size_and_batch(run, ctx.round, ctx)
            return run, optax.tree.scale(-step_size, problem.inner_gradient(run.params, run.hyper, batch))

        def push(held: tuple[_Run, PyTree], ctx: Context) -> tuple[PyTree, Array]:
            run, change = held
            return _add(run.z, change) if first else run.z, run.mass

        def record(held: tuple[_Run, PyTree], inbox: Inbox, ctx: Context) -> _Run:
            run, change = held
            z, mass = inbox.mix(push(held, ctx))
            assert inbox.sent is not None
            sent = jnp.where(jnp.arange(ctx.clients) == ctx.client, inbox.own, inbox.sent)
            now = _Tape(run.params, run.mass, sent)
            tape = jax.tree.map(lambda rows, row: rows.at[ctx.round].set(row), run.tape, now)
            return replace(run, z=z if first else _add(z, change), mass=mass, tape=tape)

        def turn(run: _Run, ctx: Context) -> _Run:
            along_x, along_hyper = outer_gradient_shares(problem, HypergradientState(run.params, run.hyper, None), ctx)
            return replace(run, u=jax.tree.map(lambda g: g / run.mass, along_x), value=along_hyper)

        def send(run: _Run, ctx: Context):
            return run.u, run.tape.sent[steps - 1 - ctx.round]

        def mix(messages: tuple[PyTree, Float[Array, "n n"]], key: PRNGKeyArray) -> PyTree:
            vectors, sent = messages
            precise = jax.lax.Precision.HIGHEST
            return jax.tree.map(lambda u: jnp.tensordot(sent, u, 1, precision=precise).astype(u.dtype), vectors)

        def receive(run: _Run, mixed: PyTree, ctx: Context) -> _Run:
            step = steps - 1 - ctx.round
            then = jax.tree.map(lambda rows: rows[step], run.tape)
            step_size, batch = self._step_size_and_batch(run, step, ctx)
            along_x, along_hyper = problem.products(then.params, run.hyper, batch, mixed if first else run.u)
            u = jax.tree.map(lambda m, h: (m - step_size / then.mass * h).astype(m.dtype), mixed, along_x)
            v = jax.tree.map(lambda v, b: (v - step_size * b).astype(v.dtype), run.value, along_hyper)
            return replace(run, u=u, value=v)

        def finish(before: HypergradientState, run: _Run, ctx: Context) -> HypergradientState:
            return replace(before, params=run.params, value=run.value)

        exchange = Exchange(push, record, conserved=True, observe=True)
        step = Scope(exchange, enter=descend, leave=lambda run, after, ctx: after)
        way_back = Repeat(Server(send, mix, receive), steps, name="ITDBackward")
        return Scope(Sequence(Repeat(step, steps, name="SGP"), Local(turn), way_back), start, finish)

    def _step_size_and_batch(self, run: _Run, step: Int[Array, ""], ctx: Context) -> tuple[Number, PyTree]:
        assert self.solver.step_size is not None
        batch = minibatch(ctx.data.train, self.solver.batch_size, jax.random.fold_in(run.key, step))
        return step_size_at(self.solver.step_size, step), batch


def _add(values: PyTree, added: PyTree) -> PyTree:
    return jax.tree.map(lambda v, a: (v + a).astype(v.dtype), values, added)
