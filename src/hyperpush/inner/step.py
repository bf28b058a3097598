"""What every inner solver does between messages: a client's own optimiser on its own examples."""

from collections.abc import Callable
from typing import Any, Protocol, cast, runtime_checkable

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from hyperpush.checks import positive, whole
from hyperpush.data.batches import Ragged, capacity, everything, rows, shuffled
from hyperpush.problem import Problem
from hyperpush.program import Node, Within

Rate = float | Callable[[Any], Any] | optax.GradientTransformation


class LinkEstimates(eqx.Module):
    """What a client learns about the network while it trains: all that it can see from where it stands.

    Stacked over clients, every field has them on axis 0.
    """

    sent: Float[Array, "*clients n"]  # p̄: mean weight it pushed to each client, its own at its own place
    heard: Float[Array, "*clients n"]  # δ̄: share of the rounds in which it heard from each client
    mass: Float[Array, "*clients"]  # time average of its push-sum weight ω


class Trained(eqx.Module):
    """A client's side of the inner problem: its parameters, its hyper-parameters, and what it saw of the network."""

    params: PyTree
    hyper: PyTree
    links: LinkEstimates | None = None


@runtime_checkable
class Solver(Protocol):
    """An inner solver: a frozen module whose fields are its options."""

    def program(self, problem: Problem) -> Node:
        """The solver as a program on `Trained` states; the client's data are `Data`."""
        ...


def optimizer(rate: Rate) -> optax.GradientTransformation:
    """Plain SGD for a number or a schedule; any Optax transformation as it is."""
    if isinstance(rate, optax.GradientTransformation):
        return rate
    if not callable(rate):
        positive("rate", rate)
    return optax.sgd(cast(float, rate))  # a schedule is as good


class Milestones(eqx.Module):
    """A rate that is multiplied by `factor` at each of the steps `at`."""

    rate: float = eqx.field(static=True, converter=float)
    at: tuple[int, ...] = eqx.field(static=True, converter=tuple)
    factor: float = eqx.field(static=True, converter=float, default=0.1)

    def __check_init__(self):
        positive("rate", self.rate)
        positive("factor", self.factor)

    def __call__(self, step: Any) -> Any:
        return optax.piecewise_constant_schedule(self.rate, dict.fromkeys(self.at, self.factor))(step)


def milestones(rate: float, at: tuple[int, ...], factor: float = 0.1) -> Milestones:
    """A rate that is multiplied by `factor` at each of the steps `at`; equal ones are compiled once."""
    return Milestones(rate, at, factor)


def check_steps(field: str, steps: int, batch: int | None) -> None:
    """Refuse a number of steps or a batch size that makes no sense."""
    whole(field, steps, least=0)
    if batch is not None:
        whole("batch", batch, least=1)


class Learner(eqx.Module):
    """A client in the middle of training."""

    params: PyTree
    hyper: PyTree
    memory: optax.OptState

    def moved(self, params: PyTree, memory: optax.OptState) -> "Learner":
        return Learner(params, self.hyper, memory)


def learning(loop: Node, transform: optax.GradientTransformation) -> Node:
    """A loop on `Learner` states as a program on `Trained` states."""
    return Within(
        loop,
        enter=lambda trained, ctx: Learner(trained.params, trained.hyper, transform.init(trained.params)),
        leave=lambda trained, state, ctx: Trained(state.params, state.hyper),
    )


def change(
    problem: Problem,
    transform: optax.GradientTransformation,
    at: Learner,
    batch: PyTree,
) -> tuple[PyTree, optax.OptState]:
    """The optimiser's change of the parameters on one batch (−rate·∇f for SGD), and its new memory."""
    return transform.update(problem.inner_gradient(at.params, at.hyper, batch), at.memory, at.params)


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
        updates, memory = change(problem, transform, state, everything(examples))
        return state.moved(optax.apply_updates(state.params, updates), memory)
    order = shuffled(examples, key)
    padded = isinstance(examples, Ragged)
    batches = -(-total // size) if padded else total // size
    order = jnp.pad(order, (0, max(batches * size - total, 0)))

    def step(state: Learner, start):
        batch = rows(examples, jax.lax.dynamic_slice_in_dim(order, start, size), start)
        updates, memory = change(problem, transform, state, batch)
        after = state.moved(optax.apply_updates(state.params, updates), memory)
        if padded:
            real = start < examples.counts
            after = jax.tree.map(lambda new, old: jnp.where(real, new, old), after, state)
        return after, None

    return jax.lax.scan(step, state, jnp.arange(batches) * size)[0]
