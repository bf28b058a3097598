"""What every inner solver does between messages: a client's own optimizer on its own examples."""

from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from hyperpush.checks import check_integer
from hyperpush.data.batches import Ragged, capacity, everything, rows, shuffled
from hyperpush.method import Method
from hyperpush.optimizers import check_optimizer
from hyperpush.problem import Problem
from hyperpush.programs import Node, Scope


class LinkEstimates(eqx.Module):
    """What a client learns about the network while it trains: all that it can see from where it stands.

    Stacked over clients, every field has them on axis 0.
    """

    sent: Float[Array, "*clients n"]  # p̄: mean weight it pushed to each client, its own at its own place
    heard: Float[Array, "*clients n"]  # δ̄: share of the rounds in which it heard from each client
    mass: Float[Array, "*clients"]  # time average of its push-sum weight ω


class InnerState(eqx.Module):
    """A client's side of the inner problem: its parameters, its hyperparameters, and what it saw of the network."""

    params: PyTree
    hyper: PyTree
    links: LinkEstimates | None = None


class InnerSolver(Method):
    """A method for the inner problem min_x (1/n) Σ_i f_i(x, λ_i).

    Its program works on `InnerState` states. Clients' data are `Data`.
    """

    sample: ClassVar[str] = "SGP(steps=…, step_size=…)"

    @property
    def loop(self) -> str:
        """The name of its main loop, in which states have the fields `params` and `hyper`."""
        return type(self).__name__


def check_training(solver: Any) -> None:
    """Refuse a number of steps, a batch size, a step size or an optimizer of a solver that make no sense."""
    name = type(solver).__name__
    check_integer(f"{name}.steps", solver.steps, minimum=0)
    check_integer(f"{name}.batch_size", solver.batch_size, minimum=1, optional=True)
    check_optimizer(name, solver.step_size, solver.optimizer)


class Learner(eqx.Module):
    """A client in the middle of training."""

    params: PyTree
    hyper: PyTree
    memory: optax.OptState

    def moved(self, params: PyTree, memory: optax.OptState) -> "Learner":
        return Learner(params, self.hyper, memory)


def learning(loop: Node, transform: optax.GradientTransformation) -> Node:
    """A loop on `Learner` states as a program on `InnerState` states."""
    return Scope(
        loop,
        enter=lambda trained, ctx: Learner(trained.params, trained.hyper, transform.init(trained.params)),
        leave=lambda trained, state, ctx: InnerState(state.params, state.hyper),
    )


def change(
    problem: Problem,
    transform: optax.GradientTransformation,
    at: Learner,
    batch: PyTree,
) -> tuple[PyTree, optax.OptState]:
    """The optimizer's change of the parameters on one batch (−rate·∇f for SGD), and its new memory."""
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
