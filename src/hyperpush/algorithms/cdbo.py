"""CDBO: PDBO with one hyper that all clients agree on, by push-sum on the outer level."""

from dataclasses import replace
from typing import ClassVar, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, PyTree

from hyperpush.algorithms.base import track
from hyperpush.algorithms.pdbo import PDBO, OuterState
from hyperpush.base.ranges import Count
from hyperpush.methods.base import MethodInfo
from hyperpush.programs import Average, Context, Exchange, Inbox, Local, Node, Repeat, Sequence
from hyperpush.task.problem import Problem


class AgreedHypers(eqx.Module):
    """A client's push-sum state of the common hypers."""

    z: PyTree  # hypers times ω
    mass: Float[Array, ""]  # push-sum weight ω
    tracker: PyTree  # y, which tracks the mean hypergradient; None without tracking
    last: PyTree  # gradient last added to y; None without tracking

    def per_mass(self, tree: PyTree) -> PyTree:
        """Return tree / ω, in the types of `tree`."""
        return jax.tree.map(lambda leaf: (leaf / self.mass).astype(leaf.dtype), tree)


class CDBO(PDBO):
    """Consensus bilevel optimization: all clients agree on one hyper that minimizes the mean outer cost.

    It is `PDBO` with `pushes` rounds of push-sum after each step, so that the hypers λ_i = z_i/ω_i agree. Each client's
    hypergradient is scaled to g_i, so that the mean of all g_i is dF̄/dλ for a common λ. With the outer optimizer's
    `update` (−rate·g for SGD), the push-sum weights P and trackers y, a step is

        tracked:      y_i ← y_i + g_i − (g_i before);  z ← P(z + ω·update(y/ω)),  ω ← Pω,  y ← Py
        not tracked:  z ← P(z + update(g)),  ω ← Pω

    Tracking is Push-DIGing (Nedić, Olshevsky and Shi, arXiv:1607.03218). It gives every client the mean gradient, so
    hypers reach a stationary point of F̄ with any optimizer, if its rate is small enough to converge. With
    `averaging="tree"` every step takes exact means along a tree, λ ← mean(λ) + update(mean(g)). Then all clients hold
    the same hyper.

    **Use it** where one hyper must suit all clients, on directed or changing networks. The task needs `common=True`.
    **Avoid it** where hypers may differ (`PDBO`), or if every client trains alone (`CDBOLocal`).

    Departures from "Personalized decentralized bilevel optimization over stochastic and directed networks", which
    proposes SGP on the outer level:

    1. `tracked` and `averaging="tree"` are not in the paper. Without tracking, messages are half as large. But then a
       constant rate leaves an error of the order of the rate if clients' costs differ. And optimizers that are not
       linear in the gradient, such as Adam, end at another point.

    Args:
        inner: The inner solver, as in `PDBO`.
        hypergradient: The estimator, as in `PDBO`.
        outer: Optimizer of the hyper, as in `PDBO`.
        steps: Steps of the hyper, 0 or more. With 0 only the inner problem is solved.
        restart: True trains from the start before every step; False continues; None decides as in `PDBO`.
        stop: Early stopping, as in `PDBO`; None takes all steps.
        remember: True lets the estimator continue from its last solution, as in `PDBO`.
        pushes: Rounds of push-sum per step, at least 1. With more, the clients' hypers agree better.
        tracked: True if clients track the mean hypergradient.
        averaging: `"push"`, or `"tree"` for clients that trust each other. `"tree"` ignores `pushes` and `tracked`.

    Raises:
        InvalidInput: An option is out of range, or solver and estimator do not fit together.

    Example:
        The clients' costs pull a common x = λ to 1, 2 and 6. The mean cost is least at λ = 3.

        >>> import jax.numpy as jnp
        >>> import hyperpush as hp
        >>> task = hp.Task(
        ...     inner=lambda x, shift, a: (x - shift - a) ** 2 / 2, outer=lambda x, shift, b: (x - b) ** 2 / 2,
        ...     params=0.0, hypers=0.0, train=jnp.zeros((3, 1)), validation=jnp.array([[1.0], [2.0], [6.0]]),
        ...     common=True,
        ... )
        >>> method = hp.CDBO(
        ...     inner=hp.SGP(steps=30, step_size=0.5), hypergradient=hp.HGP(steps=20, pushes=1, step_size=0.5),
        ...     outer=hp.optimizer("sgd", learning_rate=0.3), steps=40,
        ... )
        >>> print(hp.solve(task, method, hp.networks.FullyConnected(3), key=0).hyper.round(2))
        3.0
    """

    info: ClassVar[MethodInfo] = MethodInfo(
        network="any",
        target="global",
        sends="what the inner solver and the estimator send, and the hypers",
        paper="Personalized decentralized bilevel optimization over stochastic and directed networks",
        fixed_point="x_G",
        example=PDBO.info.example,
    )

    pushes: Count = eqx.field(static=True, default=1)
    tracked: bool = eqx.field(static=True, default=True)
    averaging: Literal["push", "tree"] = eqx.field(static=True, default="push")

    def start_consensus(self, hyper: PyTree) -> AgreedHypers | None:
        if self.averaging == "tree":
            return None
        zeros = optax.tree.zeros_like(hyper) if self.tracked else None
        return AgreedHypers(hyper, jnp.ones(()), zeros, zeros)

    def move(self, outer: optax.GradientTransformation, problem: Problem) -> Node:
        # The derivative by a common λ is the sum of estimates of d_{λ_i} F̄, or the mean of derivatives of own costs.
        adds_up = self.hypergradient.info.target == "global"

        def own_gradient(state: OuterState, ctx: Context) -> PyTree:
            return optax.tree.scale(ctx.clients if adds_up else 1, state.hypergradient)

        def step(state: OuterState, means: tuple[PyTree, PyTree], mass: Float[Array, ""], ctx: Context) -> OuterState:
            hyper, gradient = means
            updates, optimizer = outer.update(gradient, state.optimizer, hyper)
            return replace(state, hyper=optax.apply_updates(hyper, updates), optimizer=optimizer)

        if self.averaging == "tree":
            get = lambda state, ctx: ((state.hyper, own_gradient(state, ctx)), jnp.ones(()))  # noqa: E731
            return Average(get, step, rounds=1, by="tree")

        def improve(state: OuterState, ctx: Context) -> OuterState:
            shared: AgreedHypers = state.shared
            own = own_gradient(state, ctx)
            gradient, scale = own, 1
            if self.tracked:
                shared = replace(shared, tracker=track(shared.tracker, own, shared.last), last=own)
                gradient, scale = shared.per_mass(shared.tracker), shared.mass
            updates, optimizer = outer.update(gradient, state.optimizer, state.hyper)
            z = optax.apply_updates(shared.z, optax.tree.scale(scale, updates))
            return replace(state, shared=replace(shared, z=z), optimizer=optimizer)

        def send(state: OuterState, ctx: Context) -> PyTree:
            return state.shared.z, state.shared.mass, state.shared.tracker

        def receive(state: OuterState, inbox: Inbox, ctx: Context) -> OuterState:
            z, mass, tracker = inbox.mix(send(state, ctx))
            shared = AgreedHypers(z, mass, tracker, state.shared.last)
            return replace(state, shared=shared, hyper=shared.per_mass(shared.z))

        push = Exchange(send, receive, conserved=True)
        return Sequence(Local(improve), Repeat(push, self.pushes, name="consensus"))
