"""Stochastic gradient push (SGP): decentralized SGD over directed, time-varying networks."""

from dataclasses import replace
from typing import ClassVar, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, PyTree

from hyperpush.base.ranges import OptionalCount
from hyperpush.data.batches import minibatch
from hyperpush.inner.base import InnerState, ObservingSolver, see_links
from hyperpush.methods.base import MethodInfo
from hyperpush.networks.link_estimates import LinkEstimates
from hyperpush.programs import Context, Exchange, Inbox, Local, Node, Repeat, Scope, Sequence
from hyperpush.task.problem import Problem


class _State(eqx.Module):
    z: PyTree
    mass: Float[Array, ""]  # ω, the push-sum weight
    hyper: PyTree
    memory: optax.OptState
    links: LinkEstimates | None

    @property
    def params(self) -> PyTree:
        return jax.tree.map(lambda z: (z / self.mass).astype(z.dtype), self.z)


class SGP(ObservingSolver):
    """Stochastic gradient push: push-sum on the params with a gradient step in every round.

    Each client holds z_i and a weight ω_i, which starts at 1; its params are x_i = z_i / ω_i. With the push-sum
    weights P of the round's links:

        gradient-first:  z ← P(z − η ∇f(z/ω)),   ω ← Pω    (Assran et al., arXiv:1811.10792)
        gradient-after:  z ← Pz − η ∇f(z/ω),     ω ← Pω    (Nedić and Olshevsky, arXiv:1406.2075)

    **It stops near the solution**: with a constant η clients end about η away from the common solution, and from each
    other, and the status says so. A falling η comes closer (`hp.schedule(…)`). `TreeNewton` and `TrackedSGP` solve the
    problem.

    **Use it** on directed or changing networks. **Avoid it** if you have a server: `FedAvg` averages exactly. On
    undirected networks `DSGD` sends one number less.

    Args:
        steps: Rounds, each with one gradient step; 0 returns the params as they are.
        step_size: η: a number, or `hp.schedule(…)` by step. Take one below 2 / λ_max of the Hessians.
        variant: `"gradient-first"` or `"gradient-after"`.
        batch_size: Training examples per mini-batch, drawn anew in each step; None uses all.
        observe: True if clients keep the link estimates that recurrent estimators need. These are the mean weight sent
            to each other client, the frequency of messages from each, and the time average of ω. None keeps them on
            networks of fewer than 256 clients, because they take n numbers per client. In algorithms and specs, None
            keeps them if the estimator needs them.
        optimizer: Instead of `step_size`: `hp.optimizer(…)`, or any Optax transformation.

    Raises:
        InvalidInput: An option is out of range; the message names it and what is allowed.

    Example:
        The mean of 1, 2 and 6 minimizes the mean inner cost.

        >>> import jax.numpy as jnp
        >>> import hyperpush as hp
        >>> task = hp.Task(
        ...     inner=lambda x, hyper, a: (x - a) ** 2 / 2, outer=lambda x, hyper, b: (x - b) ** 2,
        ...     params=0.0, hypers=0.0, train=jnp.array([[1.0], [2.0], [6.0]]), validation=jnp.zeros((3, 1)),
        ... )
        >>> solver = hp.SGP(steps=300, step_size=hp.schedule("power", 0.5, 0.9))
        >>> print(hp.train(task, solver, hp.networks.DirectedRing(3), key=0).params.round(1))
        [3. 3. 3.]
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

    variant: Literal["gradient-first", "gradient-after"] = eqx.field(static=True, default="gradient-first")
    batch_size: OptionalCount = eqx.field(static=True, default=None)

    def program(self, problem: Problem) -> Node:
        transform, after = self.transformation, self.variant == "gradient-after"

        def enter(trained: InnerState, ctx: Context) -> _State:
            memory, links = transform.init(trained.params), self.first_links(ctx)
            return _State(trained.params, jnp.ones(()), trained.hyper, memory, links)

        def descend(state: _State, ctx: Context, start: PyTree = None) -> _State:
            batch = minibatch(ctx.data.train, self.batch_size, ctx.key)
            gradient = problem.inner_gradient(state.params, state.hyper, batch)
            updates, memory = transform.update(gradient, state.memory, state.params)
            return replace(state, z=optax.apply_updates(state.z if start is None else start, updates), memory=memory)

        def receive(state: _State, inbox: Inbox, ctx: Context) -> _State:
            z, mass = inbox.mix((state.z, state.mass))
            moved = descend(state, ctx, z) if after else replace(state, z=z)
            links = see_links(state.links, inbox, state.mass, ctx)
            return replace(moved, mass=mass, links=links)

        def leave(trained: InnerState, state: _State, ctx: Context) -> InnerState:
            return InnerState(state.params, state.hyper, state.links)

        push = Exchange(lambda state, ctx: (state.z, state.mass), receive, conserved=True, observe=bool(self.observe))
        return Scope(Repeat(push if after else Sequence(Local(descend), push), self.steps, name="SGP"), enter, leave)
