"""Stochastic gradient push: decentralised SGD over directed, time-varying networks."""

from typing import Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, PyTree

from hyperpush.data.batches import draw
from hyperpush.errors import InvalidInput
from hyperpush.inner.step import LinkEstimates, Rate, Trained, check_steps, optimizer
from hyperpush.privacy.noise import Noise, check_noise
from hyperpush.problem import Problem
from hyperpush.program import Exchange, Inbox, Local, Node, Repeat, Sequence, Within


class _State(eqx.Module):
    z: PyTree
    mass: Float[Array, ""]  # ω, the push-sum weight
    hyper: PyTree
    memory: optax.OptState
    links: LinkEstimates | None

    @property
    def params(self) -> PyTree:
        return jax.tree.map(lambda z: (z / self.mass).astype(z.dtype), self.z)


class SGP(eqx.Module):
    """Push-sum on parameters with a gradient step in every round; the parameters are x = z/ω.

    `"gradient-first"`: z ← P(z − γ∇f(z/ω)) (Assran, Loizou, Ballas, Rabbat 2019). `"gradient-after"`:
    z ← Pz − γ∇f(z/ω), the gradient at the point before mixing (Nedić, Olshevsky 2016). Always ω ← Pω from ω = 1.

    `rate` is a number, a schedule or any Optax transformation; `batch` the mini-batch size (None: all examples). With
    `observe` every client also estimates the mean weight it sends to each other client, how often it hears
    each, and the time average of ω.

    With `privacy` the optimiser gets a clipped and noisy gradient, and all else is made of what others may know: a step
    is a release. The mini-batch's size then is N.
    """

    steps: int = eqx.field(static=True)
    rate: Rate = eqx.field(static=True)
    order: Literal["gradient-first", "gradient-after"] = eqx.field(static=True, default="gradient-first")
    batch: int | None = eqx.field(static=True, default=None)
    observe: bool = eqx.field(static=True, default=False)
    privacy: Noise | None = None

    def __check_init__(self):
        check_steps("SGP.steps", self.steps, self.batch)
        optimizer(self.rate)
        check_noise("SGP.privacy", self.privacy)
        if self.order not in ("gradient-first", "gradient-after"):
            raise InvalidInput("SGP.order", self.order, "'gradient-first' or 'gradient-after'")

    @property
    def releases(self) -> int:
        return self.steps

    def program(self, problem: Problem) -> Node:
        transform = optimizer(self.rate)

        def move(state: _State, ctx):
            at = state.params, state.hyper
            if self.privacy is None:
                gradient = problem.inner_gradient(*at, draw(ctx.data.inner, self.batch, ctx.key))
            else:
                first, second = jax.random.split(ctx.key)
                batch = draw(ctx.data.inner, self.batch, first)
                gradient = self.privacy.inner_gradient(problem, *at, batch, second, ctx.round)
            return transform.update(gradient, state.memory, state.params)

        def receive(state: _State, inbox: Inbox, ctx):
            z, mass = inbox.mix((state.z, state.mass))
            memory = state.memory
            if self.order == "gradient-after":
                updates, memory = move(state, ctx)
                z = optax.apply_updates(z, updates)
            return _State(z, mass, state.hyper, memory, self._observe(state, inbox, ctx))

        push = Exchange(
            send=lambda state, ctx: (state.z, state.mass), receive=receive, conserved=True, observe=self.observe
        )
        if self.order == "gradient-first":

            def descend(state: _State, ctx):
                updates, memory = move(state, ctx)
                return _State(optax.apply_updates(state.z, updates), state.mass, state.hyper, memory, state.links)

            push = Sequence(Local(descend), push)

        def enter(trained: Trained, ctx):
            links = None
            if self.observe:
                nobody = jnp.zeros((ctx.clients,))
                links = LinkEstimates(nobody, nobody, jnp.zeros(()))
            memory = transform.init(trained.params)
            return _State(trained.params, jnp.ones(()), trained.hyper, memory, links)

        def leave(trained: Trained, state: _State, ctx):
            links = state.links
            if links is not None:
                links = jax.tree.map(lambda total: total / max(self.steps, 1), links)
            return Trained(state.params, state.hyper, links)

        return Within(Repeat(push, self.steps, name="SGP"), enter, leave)

    @staticmethod
    def _observe(state: _State, inbox: Inbox, ctx) -> LinkEstimates | None:
        if state.links is None or inbox.sent is None or inbox.heard is None:
            return None
        me = jnp.arange(ctx.clients) == ctx.client
        sent = jnp.where(me, inbox.own, inbox.sent)
        return LinkEstimates(
            state.links.sent + sent,
            state.links.heard + (inbox.heard | me),
            state.links.mass + state.mass,
        )
