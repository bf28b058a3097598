"""Stochastic gradient push (SGP): decentralized SGD over directed, time-varying networks."""

from typing import ClassVar, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, PyTree

from hyperpush.data.batches import draw
from hyperpush.inner.base import InnerSolver, InnerState, LinkEstimates, check_training
from hyperpush.method import MethodInfo, as_number
from hyperpush.optimizers import Optimizer, StepSize, build
from hyperpush.problem import Problem
from hyperpush.programs import Exchange, Inbox, Local, Node, Repeat, Scope, Sequence


class _State(eqx.Module):
    z: PyTree
    mass: Float[Array, ""]  # ω, the push-sum weight
    hyper: PyTree
    memory: optax.OptState
    links: LinkEstimates | None

    @property
    def params(self) -> PyTree:
        return jax.tree.map(lambda z: (z / self.mass).astype(z.dtype), self.z)


class SGP(InnerSolver):
    """Stochastic gradient push: push-sum on the params with a gradient step in every round.

    Each client holds z_i and a weight ω_i, which starts at 1; its params are x_i = z_i / ω_i. With the push-sum
    weights P of the round's links:

        gradient-first:  z ← P(z − η ∇f(z/ω)),   ω ← Pω    (Assran et al., arXiv:1811.10792)
        gradient-after:  z ← Pz − η ∇f(z/ω),     ω ← Pω    (Nedić and Olshevsky, arXiv:1406.2075)

    With a constant η clients end about η away from the common solution, and from each other. A falling one converges.

    **Use it** on directed or changing networks. **Avoid it** if you have a server: `FedAvg` averages exactly. On
    undirected networks `DSGD` sends one number less.

    Args:
        steps: Rounds, each with one gradient step; 0 returns the params as they are.
        step_size: η: a number, or `hp.schedule(…)` by step. Take one below 2 / λ_max of the Hessians.
        variant: `"gradient-first"` or `"gradient-after"`. Tell recurrent estimators the same.
        batch_size: Training examples per mini-batch, drawn anew in each step; None uses all.
        observe: Also estimate what recurrent estimators need: the mean weight sent to each other client, how often
            each is heard, and the time average of ω.
        optimizer: Instead of `step_size`: `hp.optimizer(…)`, or any Optax transformation.

    Raises:
        InvalidInput: An option is out of range; the message names it and what is allowed.
    """

    info: ClassVar[MethodInfo] = MethodInfo(
        network="any",
        target="inner",
        sends="one vector of the size of the params, and one number, per step",
        paper="Assran et al., arXiv:1811.10792; Nedić and Olshevsky, arXiv:1406.2075",
        private=True,
        lossy=True,
        example={"steps": 20, "step_size": 0.1},
    )

    steps: int = eqx.field(static=True)
    step_size: StepSize | None = eqx.field(converter=as_number, default=None)
    variant: Literal["gradient-first", "gradient-after"] = eqx.field(static=True, default="gradient-first")
    batch_size: int | None = eqx.field(static=True, default=None)
    observe: bool = eqx.field(static=True, default=False)
    optimizer: Optimizer | optax.GradientTransformation | None = None

    def __check_init__(self):
        check_training(self)

    def program(self, problem: Problem) -> Node:
        transform = build(self.step_size, self.optimizer)

        def move(state: _State, ctx):
            batch = draw(ctx.data.train, self.batch_size, ctx.key)
            gradient = problem.inner_gradient(state.params, state.hyper, batch)
            return transform.update(gradient, state.memory, state.params)

        def receive(state: _State, inbox: Inbox, ctx):
            z, mass = inbox.mix((state.z, state.mass))
            memory = state.memory
            if self.variant == "gradient-after":
                updates, memory = move(state, ctx)
                z = optax.apply_updates(z, updates)
            return _State(z, mass, state.hyper, memory, self._observe(state, inbox, ctx))

        push = Exchange(
            send=lambda state, ctx: (state.z, state.mass), receive=receive, conserved=True, observe=self.observe
        )
        if self.variant == "gradient-first":

            def descend(state: _State, ctx):
                updates, memory = move(state, ctx)
                return _State(optax.apply_updates(state.z, updates), state.mass, state.hyper, memory, state.links)

            push = Sequence(Local(descend), push)

        def enter(trained: InnerState, ctx):
            links = None
            if self.observe:
                nobody = jnp.zeros((ctx.clients,))
                links = LinkEstimates(nobody, nobody, jnp.zeros(()))
            memory = transform.init(trained.params)
            return _State(trained.params, jnp.ones(()), trained.hyper, memory, links)

        def leave(trained: InnerState, state: _State, ctx):
            links = state.links
            if links is not None:
                links = jax.tree.map(lambda total: total / max(self.steps, 1), links)
            return InnerState(state.params, state.hyper, links)

        return Scope(Repeat(push, self.steps, name="SGP"), enter, leave)

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
