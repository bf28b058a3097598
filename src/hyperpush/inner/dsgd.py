"""Decentralized SGD (DSGD): gossip with doubly stochastic weights on undirected networks."""

from dataclasses import replace
from typing import ClassVar, Literal

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import PyTree

from hyperpush.base.ranges import OptionalCount
from hyperpush.data.batches import minibatch
from hyperpush.inner.base import Learner, ObservingSolver, see_links, solver_program
from hyperpush.methods.base import MethodInfo
from hyperpush.programs import Context, Exchange, Inbox, Local, Node, Repeat, Sequence
from hyperpush.task.problem import Problem


class DSGD(ObservingSolver):
    """Decentralized SGD: each round is a gradient step and a weighted mean with the neighbors.

    A round updates the clients' params x, with the doubly stochastic weights W of the round's links (Lian et al.,
    arXiv:1705.09056):

        gradient-first:  x ← W(x − η ∇f(x))
        gradient-after:  x ← Wx − η ∇f(x)

    **It stops near the solution**: with a constant η clients end about η away from the common solution, and from each
    other, and the status says so. A falling η comes closer (`hp.schedule(…)`). `TreeNewton` and `TrackedSGP` solve the
    problem.

    **Use it** on undirected networks. **Avoid it** elsewhere: it refuses directed networks, which `SGP` can use.

    Args:
        steps: Rounds, each with one gradient step; 0 returns the params as they are.
        step_size: η: a number, or `hp.schedule(…)` by step. Take one below 2 / λ_max of the Hessians.
        variant: `"gradient-first"` or `"gradient-after"`.
        batch_size: Training examples per mini-batch, drawn anew in each step; None uses all.
        observe: True if clients keep estimates of their links, as in `SGP`.
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
        >>> solver = hp.DSGD(steps=300, step_size=hp.schedule("power", 0.5, 0.9))
        >>> print(hp.train(task, solver, hp.networks.Ring(3), key=0).params.round(1))
        [3. 3. 3.]
    """

    info: ClassVar[MethodInfo] = MethodInfo(
        network="undirected",
        target="inner",
        sends="one vector of the size of the params per step",
        paper="Lian et al., arXiv:1705.09056",
        example={"steps": 20, "step_size": 0.1},
    )

    variant: Literal["gradient-first", "gradient-after"] = eqx.field(static=True, default="gradient-first")
    batch_size: OptionalCount = eqx.field(static=True, default=None)

    @property
    def weights(self) -> Literal["push", "gossip"]:
        return "gossip"

    def program(self, problem: Problem) -> Node:
        transform, after = self.transformation, self.variant == "gradient-after"

        def descend(state: Learner, ctx: Context, start: PyTree = None) -> Learner:
            return state.step(problem, transform, minibatch(ctx.data.train, self.batch_size, ctx.key), start)

        def receive(state: Learner, inbox: Inbox, ctx: Context) -> Learner:
            mixed = inbox.mix(state.params)
            links = see_links(state.links, inbox, jnp.ones(()), ctx)
            state = replace(state, links=links)
            return descend(state, ctx, mixed) if after else state.at(mixed, state.memory)

        observe = bool(self.observe)
        mix = Exchange(lambda state, ctx: state.params, receive, weights="gossip", observe=observe)
        step = mix if after else Sequence(Local(descend), mix)
        return solver_program(Repeat(step, self.steps, name="DSGD"), transform, self.first_links)
