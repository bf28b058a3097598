"""What every inner solver does between messages: a client's own optimizer on its own examples."""

from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from hyperpush.checks.ranges import Whole
from hyperpush.data.batches import Ragged, capacity, everything, rows, shuffle
from hyperpush.method import Method, as_number
from hyperpush.optimizers import Optimizer, StepSize, build, check_optimizer
from hyperpush.problem import Problem
from hyperpush.programs import Node, Scope


class LinkEstimates(eqx.Module):
    """What a client learns about the network while it trains: all that it can see from where it stands.

    Stacked over clients, every field has them on axis 0.

    Args:
        sent: p̄: the mean weight that it pushed to each client, its own at its own place.
        heard: δ̄: the share of the rounds in which it heard from each client.
        mass: The time average of its push-sum weight ω.

    Example:
        >>> import hyperpush as hp
        >>> task, network = hp.tasks.quadratic(3, seed=0), hp.networks.FullyConnected(3)
        >>> seen = hp.train(task, hp.SGP(steps=10, step_size=0.1, observe=True), network, key=0).task.point.links
        >>> seen.heard.shape
        (3, 3)
    """

    sent: Float[Array, "*clients n"]  # p̄: mean weight it pushed to each client, its own at its own place
    heard: Float[Array, "*clients n"]  # δ̄: share of the rounds in which it heard from each client
    mass: Float[Array, "*clients"]  # time average of its push-sum weight ω


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


class Learner(eqx.Module):
    """A client in the middle of training."""

    params: PyTree
    hyper: PyTree
    memory: optax.OptState

    def at(self, params: PyTree, memory: optax.OptState) -> "Learner":
        """The same client at other params."""
        return Learner(params, self.hyper, memory)

    def step(
        self, problem: Problem, transform: optax.GradientTransformation, batch: PyTree, start: PyTree = None
    ) -> "Learner":
        """One step of the optimizer on a batch: the own params, or others to start from, plus the update."""
        gradient = problem.inner_gradient(self.params, self.hyper, batch)
        updates, memory = transform.update(gradient, self.memory, self.params)
        return self.at(optax.apply_updates(self.params if start is None else start, updates), memory)


def solver_program(loop: Node, transform: optax.GradientTransformation) -> Node:
    """A loop on `Learner` states as a program on `InnerState` states."""
    return Scope(
        loop,
        enter=lambda trained, ctx: Learner(trained.params, trained.hyper, transform.init(trained.params)),
        leave=lambda trained, state, ctx: InnerState(state.params, state.hyper),
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
