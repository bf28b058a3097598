"""What every inner solver does between messages: a client's own optimizer on its own examples."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar, Literal, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from hyperpush.checks.ranges import Whole
from hyperpush.data.batches import Ragged, capacity, everything, rows, shuffle
from hyperpush.method import Method, as_number
from hyperpush.networks import Network
from hyperpush.optimizers import Optimizer, StepSize, build, check_optimizer
from hyperpush.problem import Problem
from hyperpush.programs import Context, Inbox, Node, Scope

S = TypeVar("S", bound="InnerSolver")
Observing = TypeVar("Observing", bound="ObservingSolver")
_MANY = 256  # from here on, n² numbers about links are kept only where they are asked for


class LinkEstimates(eqx.Module):
    """What a client learns about the network while it trains: all that it can see from where it stands.

    Stacked over clients, every field has them on axis 0.

    Args:
        sent: p̄: the mean weight that it pushed to each client, its own at its own place.
        heard: δ̄: the share of the rounds in which it heard from each client.
        mass: The time average of its push-sum weight ω; 1 where weights are doubly stochastic.
        rounds: How many rounds it has seen.

    Example:
        >>> import hyperpush as hp
        >>> task, network = hp.tasks.quadratic(3, seed=0), hp.networks.FullyConnected(3)
        >>> seen = hp.train(task, hp.SGP(steps=10, step_size=0.1), network, key=0).links
        >>> print(seen.heard.shape, seen.rounds)
        (3, 3) [10. 10. 10.]
    """

    sent: Float[Array, "*clients n"]  # p̄: mean weight it sent to each client, its own at its own place
    heard: Float[Array, "*clients n"]  # δ̄: share of the rounds in which it heard from each client
    mass: Float[Array, "*clients"]  # time average of its push-sum weight ω
    rounds: Float[Array, "*clients"]  # how many rounds these are means of

    @staticmethod
    def none(clients: int, axis: tuple[int, ...] = ()) -> "LinkEstimates":
        """Nothing seen yet, of one client or of all along a leading axis."""
        nobody, number = jnp.zeros((*axis, clients)), jnp.zeros(axis)
        return LinkEstimates(nobody, nobody, number, number)

    def add(self, inbox: Inbox, mass: Float[Array, ""], ctx: Context) -> "LinkEstimates":
        """The means with one more round: what the client sent and heard, and its push-sum weight before it."""
        assert inbox.sent is not None  # the exchange observes
        assert inbox.heard is not None
        me = jnp.arange(ctx.clients) == ctx.client
        heard = (inbox.heard | me).astype(self.heard.dtype)
        return self.join(LinkEstimates(jnp.where(me, inbox.own, inbox.sent), heard, mass, jnp.ones(())))

    def join(self, other: "LinkEstimates") -> "LinkEstimates":
        """The means over the rounds of both."""
        rounds = self.rounds + other.rounds
        share = other.rounds / jnp.maximum(rounds, 1)
        means = jax.tree.map(lambda a, b: a + share * (b - a), self, other)
        return replace(means, rounds=rounds)


def join_links(known: LinkEstimates | None, seen: LinkEstimates | None) -> LinkEstimates | None:
    """What is known of links after training: all that was seen so far, if an estimator asks for it (not None)."""
    return known if known is None or seen is None else known.join(seen)


class InnerState(eqx.Module):
    """A client's side of the inner problem: its parameters, its hyperparameters, and what it saw of the network.

    Args:
        params: x_i.
        hyper: λ_i.
        links: What it saw; None if it did not look.

    Example:
        >>> import jax.numpy as jnp
        >>> import hyperpush as hp
        >>> hp.programs.InnerState(params=jnp.zeros(3), hyper=jnp.zeros(())).links is None
        True
    """

    params: PyTree
    hyper: PyTree
    links: LinkEstimates | None = None


class InnerSolver(Method):
    """A method for the inner problem min_x (1/n) Σ_i f_i(x, λ_i).

    Its program works on `InnerState` states. Clients' data are `Data`.

    Example:
        >>> import hyperpush as hp
        >>> isinstance(hp.SGP(steps=10, step_size=0.1), hp.programs.InnerSolver)
        True
    """

    sample: ClassVar[str] = "SGP(steps=…, step_size=…)"

    @property
    def loop(self) -> str:
        """The name of its main loop, in which states have the fields `params` and `hyper`."""
        return type(self).__name__

    @property
    def weights(self) -> Literal["push", "gossip"]:
        """The weights with which it mixes params; those of an exact mean are "push" where all hear all."""
        return "gossip" if getattr(self, "averaging", None) == "gossip" else "push"

    @property
    def iteration(self) -> dict[str, Any]:
        """What estimators that go back through its steps have to know of them; None: there is no such thing."""
        return {"weights": self.weights}

    def observing(self: S, wanted: bool) -> S:
        """The same solver whose clients observe their links, or do not; itself if it cannot."""
        return self


class GradientSolver(InnerSolver):
    """An inner solver whose clients descend along their own gradients."""

    steps: Whole = eqx.field(static=True)
    step_size: StepSize | None = eqx.field(converter=as_number, default=None)
    optimizer: Optimizer | optax.GradientTransformation | None = eqx.field(default=None, kw_only=True)

    def __check_init__(self):
        check_optimizer(type(self).__name__, self.step_size, self.optimizer)

    @property
    def transformation(self) -> optax.GradientTransformation:
        """Plain SGD with `step_size`, or the optimizer."""
        return build(self.step_size, self.optimizer)


class ObservingSolver(GradientSolver):
    """A solver whose clients mix params with their neighbors in every step, and can observe their links meanwhile."""

    observe: bool | None = eqx.field(static=True, default=None, kw_only=True)

    @property
    def iteration(self) -> dict[str, Any]:
        last = self.step_size(max(self.steps - 1, 0)) if callable(self.step_size) else self.step_size
        step_size = None if last is None else float(last)
        return {**super().iteration, "variant": getattr(self, "variant", None), "step_size": step_size}

    def on(self: Observing, network: Network, engine: Any = None, task: Any = None) -> Observing:
        return self if self.observe is not None else self.observing(network.clients < _MANY)

    def observing(self: Observing, wanted: bool) -> Observing:
        return replace(self, observe=wanted)

    def first_links(self, ctx: Context) -> LinkEstimates | None:
        """What a client has seen before it trains; None if it does not look."""
        return LinkEstimates.none(ctx.clients) if self.observe else None


class Learner(eqx.Module):
    """A client in the middle of training."""

    params: PyTree
    hyper: PyTree
    memory: optax.OptState
    links: LinkEstimates | None = None

    def at(self, params: PyTree, memory: optax.OptState) -> "Learner":
        """The same client at other params."""
        return replace(self, params=params, memory=memory)

    def step(
        self, problem: Problem, transform: optax.GradientTransformation, batch: PyTree, start: PyTree = None
    ) -> "Learner":
        """One step of the optimizer on a batch: the own params, or others to start from, plus the update."""
        gradient = problem.inner_gradient(self.params, self.hyper, batch)
        updates, memory = transform.update(gradient, self.memory, self.params)
        return self.at(optax.apply_updates(self.params if start is None else start, updates), memory)


def solver_program(
    loop: Node,
    transform: optax.GradientTransformation,
    links: Callable[[Context], LinkEstimates | None] = lambda ctx: None,
) -> Node:
    """A loop on `Learner` states as a program on `InnerState` states; `links` is what they have seen before."""
    return Scope(
        loop,
        enter=lambda trained, ctx: Learner(trained.params, trained.hyper, transform.init(trained.params), links(ctx)),
        leave=lambda trained, state, ctx: InnerState(state.params, state.hyper, state.links),
    )


def epoch(
    problem: Problem,
    transform: optax.GradientTransformation,
    state: Learner,
    examples: PyTree,
    size: int | None,
    key: PRNGKeyArray,
) -> Learner:
    """One pass over a client's examples in shuffled mini-batches.

    Clients with fewer examples have fewer batches: the rest is padding that changes nothing. Without padding
    information (data that are not `Ragged`) an incomplete last batch is left out; shuffling makes up for it.
    """
    total = capacity(examples)
    if size is None or size >= total:
        return state.step(problem, transform, everything(examples))
    order = shuffle(examples, key)
    padded = isinstance(examples, Ragged)
    batches = -(-total // size) if padded else total // size
    order = jnp.pad(order, (0, max(batches * size - total, 0)))

    def step(state: Learner, start):
        batch = rows(examples, jax.lax.dynamic_slice_in_dim(order, start, size), start)
        after = state.step(problem, transform, batch)
        if padded:
            real = start < examples.counts
            after = jax.tree.map(lambda new, old: jnp.where(real, new, old), after, state)
        return after, None

    return jax.lax.scan(step, state, jnp.arange(batches) * size)[0]
