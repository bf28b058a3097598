"""Base classes of inner solvers, and the local training that clients do between messages."""

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
_MANY = 256  # number of clients from which link estimates, n² numbers in all, are kept only on request


def see_links(links: LinkEstimates | None, inbox: Inbox, mass: Float[Array, ""], ctx: Context) -> LinkEstimates | None:
    """Return the link estimates with a client's observations of one round; None if the client keeps no estimates."""
    if links is None:
        return None
    assert inbox.sent is not None  # the exchange observes
    assert inbox.heard is not None
    me = jnp.arange(ctx.clients) == ctx.client
    return links.add(jnp.where(me, inbox.own, inbox.sent), inbox.heard | me, mass)


class InnerState(eqx.Module):
    """A client's side of the inner problem: its parameters, its hyperparameters, and its estimates of its links.

    Args:
        params: x_i.
        hyper: λ_i.
        links: Estimates of the client's links; None if it does not observe them.
        report: Convergence report of the solver; None after solvers of fixed length.
        memory: State that the solver keeps for the next outer step; None if it keeps nothing.

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
    """The base class of methods for the inner problem min_x (1/n) Σ_i f_i(x, λ_i).

    The method's program works on states of type `InnerState`. Each client's data are a `Data`.

    Example:
        >>> import hyperpush as hp
        >>> isinstance(hp.SGP(steps=10, step_size=0.1), hp.extend.InnerSolver)
        True
    """

    sample: ClassVar[str] = "SGP(steps=…, step_size=…)"
    certifies: ClassVar[bool] = False  # True if a random probe supports the error in its report

    @property
    def weights(self) -> Literal["push", "gossip"]:
        """Weights with which the solver mixes params; "push" for an exact mean, as on a fully connected network."""
        return "gossip" if self.option("averaging") == "gossip" else "push"

    @property
    def iteration(self) -> dict[str, Any]:
        """Weights, variant and step size (None if unknown), for estimators that differentiate through the steps."""
        return {"weights": self.weights}

    def observing(self: S, wanted: bool) -> S:
        """Return the solver with observation of links if `wanted`, else without; itself if it cannot observe links."""
        return self

    @property
    def solves(self) -> bool:
        """True if the solver runs until the inner problem is solved, so that it may start from any point."""
        return False

    @property
    def stacks(self) -> bool:
        """True if several runs may share messages (`hyperpush.programs.stack`); valid for bound solvers only."""
        return False

    def memory(self, params: PyTree, hyper: PyTree) -> Any:
        """Return one client's memory before the first outer step; None if the solver keeps none."""
        return None

    def status(self, states: InnerState) -> Status:
        report = getattr(states, "report", None)
        return Status() if report is None else report.status()


class GradientSolver(InnerSolver):
    """The base class of inner solvers in which each client descends along its own gradient."""

    can_find_step: ClassVar[bool] = False  # True if the solver can determine its step size

    steps: Whole = eqx.field(static=True)
    step_size: StepSize | None = eqx.field(converter=as_number, default=None)
    optimizer: Optimizer | optax.GradientTransformation | None = eqx.field(default=None, kw_only=True)

    def __check_init__(self):
        if not self.finds_step:
            check_optimizer(type(self).__name__, self.step_size, self.optimizer)

    @property
    def finds_step(self) -> bool:
        """True if the solver determines its step size, because neither a step size nor an optimizer is given."""
        return self.can_find_step and self.step_size is None and self.optimizer is None

    @property
    def caveat(self) -> str:
        return "" if self.optimizer is not None or callable(self.step_size) else CONSTANT

    @property
    def transformation(self) -> optax.GradientTransformation:
        """Optax transformation: plain SGD with `step_size`, or `optimizer`; a determined step size is SGD's memory."""
        return _sgd_of_memory() if self.finds_step else build(self.step_size, self.optimizer)


def _sgd_of_memory() -> optax.GradientTransformation:
    """Return plain SGD whose memory is the step size; it is 0 until the solver sets it."""

    def init(params: PyTree) -> Float[Array, ""]:
        return jnp.zeros((), jnp.result_type(*jax.tree.leaves(params)))

    def update(updates: PyTree, state: PyTree, params: PyTree = None) -> tuple[PyTree, PyTree]:
        return jax.tree.map(lambda leaf: (-state * leaf).astype(leaf.dtype), updates), state

    return optax.GradientTransformation(init, update)


class ObservingSolver(GradientSolver):
    """The base class of solvers whose clients mix params with neighbors in every step and can observe their links."""

    observe: bool | None = eqx.field(static=True, default=None, kw_only=True)

    @property
    def iteration(self) -> dict[str, Any]:
        last = self.step_size(max(self.steps - 1, 0)) if callable(self.step_size) else self.step_size
        step_size = None if last is None else float(last)
        return {**super().iteration, "variant": self.option("variant"), "step_size": step_size}

    def bind(self: Observing, network: Network, engine: Any = None, task: Any = None) -> Observing:
        return self if self.observe is not None else self.observing(network.clients < _MANY)

    def observing(self: Observing, wanted: bool) -> Observing:
        return replace(self, observe=wanted)

    def first_links(self, ctx: Context) -> LinkEstimates | None:
        """Return the link estimates before training, without observations; None if clients do not observe links."""
        return LinkEstimates.none(ctx.clients) if self.observe else None


class Learner(eqx.Module):
    """A client's state during training."""

    params: PyTree
    hyper: PyTree
    memory: optax.OptState
    links: LinkEstimates | None = None

    def at(self, params: PyTree, memory: optax.OptState) -> "Learner":
        """Return the state with other params and another optimizer memory."""
        return replace(self, params=params, memory=memory)

    def step(
        self, problem: Problem, transform: optax.GradientTransformation, batch: PyTree, start: PyTree = None
    ) -> "Learner":
        """Return the state after one optimizer step on a batch, from the client's params or from `start`."""
        gradient = problem.inner_gradient(self.params, self.hyper, batch)
        updates, memory = transform.update(gradient, self.memory, self.params)
        return self.at(optax.apply_updates(self.params if start is None else start, updates), memory)


def solver_program(
    loop: Node,
    transform: optax.GradientTransformation,
    links: Callable[[Context], LinkEstimates | None] = lambda ctx: None,
) -> Node:
    """Return a program on `InnerState` states that runs a loop on `Learner` states; `links` makes link estimates."""
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
    """Return the state after one pass over a client's examples in shuffled mini-batches of `size` examples.

    Clients with fewer examples have fewer batches; the remaining batches are padding and change nothing. Data that are
    not `Ragged` are without padding. Then an incomplete last batch is left out; shuffling varies the examples left out.
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
