"""What every inner solver does between messages: a client's own optimizer on its own examples."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar, Literal, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from hyperpush.base.numbers import as_number
from hyperpush.base.ranges import Whole
from hyperpush.base.schedules import StepSize
from hyperpush.base.status import Status
from hyperpush.data.batches import Ragged, capacity, full_batch, rows, shuffle
from hyperpush.methods.base import Method
from hyperpush.methods.optimizers import Optimizer, build, check_optimizer
from hyperpush.networks import Network
from hyperpush.networks.link_estimates import LinkEstimates
from hyperpush.programs import Context, Inbox, Node, Scope
from hyperpush.programs.report import Report
from hyperpush.task.problem import Problem

S = TypeVar("S", bound="InnerSolver")
Observing = TypeVar("Observing", bound="ObservingSolver")
CONSTANT = "constant steps stop near the solution"
_MANY = 256  # from here on, n² numbers about links are kept only where they are asked for


def see_links(links: LinkEstimates | None, inbox: Inbox, mass: Float[Array, ""], ctx: Context) -> LinkEstimates | None:
    """Add what a client sees of its links in one round; None where nobody asks for it."""
    if links is None:
        return None
    assert inbox.sent is not None  # the exchange observes
    assert inbox.heard is not None
    me = jnp.arange(ctx.clients) == ctx.client
    return links.add(jnp.where(me, inbox.own, inbox.sent), inbox.heard | me, mass)


class InnerState(eqx.Module):
    """A client's side of the inner problem: its parameters, its hyperparameters, and what it saw of the network.

    Args:
        params: x_i.
        hyper: λ_i.
        links: What it saw; None if it did not look.
        report: What it knows of the result; None after solvers of fixed length.
        memory: What the solver keeps for the next outer step; None if it keeps nothing.

    Example:
        >>> import jax.numpy as jnp
        >>> import hyperpush as hp
        >>> hp.extend.InnerState(params=jnp.zeros(3), hyper=jnp.zeros(())).links is None
        True
    """

    params: PyTree
    hyper: PyTree
    links: LinkEstimates | None = None
    report: Report | None = None
    memory: PyTree = None


class InnerSolver(Method):
    """A method for the inner problem min_x (1/n) Σ_i f_i(x, λ_i).

    Its program works on `InnerState` states. Clients' data are `Data`.

    Example:
        >>> import hyperpush as hp
        >>> isinstance(hp.SGP(steps=10, step_size=0.1), hp.extend.InnerSolver)
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

    @property
    def caveat(self) -> str:
        """Why its params are not quite the solution, in words for its status; empty if they may be."""
        return ""

    @property
    def solves(self) -> bool:
        """Whether it goes on until the inner problem is solved, so that it may start from any point."""
        return False

    def memory(self, params: PyTree, hyper: PyTree) -> Any:
        """One client's memory before the first outer step; None for a solver that keeps nothing."""
        return None

    def status(self, states: InnerState) -> Status:
        report = getattr(states, "report", None)
        return Status() if report is None else report.status()


class GradientSolver(InnerSolver):
    """An inner solver whose clients descend along their own gradients."""

    steps: Whole = eqx.field(static=True)
    step_size: StepSize | None = eqx.field(converter=as_number, default=None)
    optimizer: Optimizer | optax.GradientTransformation | None = eqx.field(default=None, kw_only=True)

    def __check_init__(self):
        check_optimizer(type(self).__name__, self.step_size, self.optimizer)

    @property
    def caveat(self) -> str:
        return "" if self.step_size is None or callable(self.step_size) else CONSTANT

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

    def bind(self: Observing, network: Network, engine: Any = None, task: Any = None) -> Observing:
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
        return state.step(problem, transform, full_batch(examples))
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
