"""Tracked hyper-gradient push: gradient tracking over push-sum, without the bias of a finite number of pushes."""

from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from hyperpush.checks import positive, whole
from hyperpush.data.batches import draw, everything
from hyperpush.estimators.state import Declaration, Hyper, shared_gradients
from hyperpush.problem import Problem
from hyperpush.program import Context, Exchange, Inbox, Local, Node, Repeat, Sequence, Within


class _State(eqx.Module):
    params: PyTree
    hyper: PyTree
    source: PyTree  # (1/n)∂_x F_i
    z: PyTree
    mass: Float[Array, ""]  # ω
    gradient: PyTree  # g_i at the last q
    tracker: PyTree  # y

    @property
    def q(self) -> PyTree:
        return jax.tree.map(lambda z: z / self.mass, self.z)


class TrackedHGP(eqx.Module):
    """Solve min_q Σ_k ½qᵀH_k q − c_kᵀq together, c_k = (1/n)∂_x F_k, then v_i = (1/n)∂_λ F_i − B_i q_i.

    Gradient tracking over push-sum (Push-DIGing: Nedić, Olshevsky, Shi 2017) on the quadratic whose solution the closed
    form of the hyper-gradient contains: with g_i(q) = H_i q − c_i and y = g(q), `steps` times

        z ← P(z − αy), ω ← Pω, q⁺ = z/ω, y ← Py + g(q⁺) − g(q)

    with `pushes` rounds for each P. The only fixed point is the solution, so there is no bias, and all that is pushed
    (z, ω, y) is conserved, so it also works where messages get lost. It converges for steps `step` = α below a bound
    that falls with 1/λ_max of the mean Hessian and with how badly the network mixes; more pushes allow larger steps.
    With mini-batches (`batch`) a noise floor remains that falls with α.
    """

    declares: ClassVar[Declaration] = Declaration(
        network="any: directed, time-varying, lossy",
        target="global: everybody's mean outer cost",
        sends="two vectors of the size of the params",
        matrices=False,
        paper="here; after Nedić, Olshevsky and Shi, Achieving geometric convergence over time-varying graphs",
    )

    steps: int = eqx.field(static=True)
    step: float = eqx.field(static=True, converter=float)
    pushes: int = eqx.field(static=True, default=1)
    batch: int | None = eqx.field(static=True, default=None)

    def __check_init__(self):
        whole("TrackedHGP.steps", self.steps, least=0)
        whole("TrackedHGP.pushes", self.pushes, least=1)
        positive("TrackedHGP.step", self.step)
        if self.batch is not None:
            whole("TrackedHGP.batch", self.batch, least=1)

    def program(self, problem: Problem) -> Node:
        def enter(state: Hyper, ctx: Context):
            source, _ = shared_gradients(problem, state, ctx)
            zero, slope = jax.tree.map(jnp.zeros_like, source), jax.tree.map(jnp.negative, source)
            return _State(state.params, state.hyper, source, zero, jnp.ones(()), slope, slope)

        def descend(state: _State, ctx: Context):
            z = jax.tree.map(lambda z, y: z - self.step * y, state.z, state.tracker)
            return _State(state.params, state.hyper, state.source, z, state.mass, state.gradient, state.tracker)

        def receive(state: _State, inbox: Inbox, ctx: Context):
            z, mass, tracker = inbox.mix((state.z, state.mass, state.tracker))
            return _State(state.params, state.hyper, state.source, z, mass, state.gradient, tracker)

        def track(state: _State, ctx: Context):
            batch = draw(ctx.data.inner, self.batch, ctx.key)
            product, _ = problem.products(state.params, state.hyper, batch, state.q)
            gradient = jax.tree.map(jnp.subtract, product, state.source)
            tracker = jax.tree.map(lambda y, new, old: y + new - old, state.tracker, gradient, state.gradient)
            return _State(state.params, state.hyper, state.source, state.z, state.mass, gradient, tracker)

        def leave(before: Hyper, state: _State, ctx: Context):
            _, along_hyper = shared_gradients(problem, before, ctx)
            _, product = problem.products(before.params, before.hyper, everything(ctx.data.inner), state.q)
            return Hyper(before.params, before.hyper, jax.tree.map(jnp.subtract, along_hyper, product), before.links)

        push = Exchange(send=lambda state, ctx: (state.z, state.mass, state.tracker), receive=receive, conserved=True)
        body = Sequence(Local(descend), Repeat(push, self.pushes, name="pushes"), Local(track))
        return Within(Repeat(body, self.steps, name="TrackedHGP"), enter, leave)
