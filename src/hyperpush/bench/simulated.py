"""SGP and HGP on the engine `Simulate`, with the arguments and results of `loop.py`."""

from collections.abc import Callable

import jax
from jaxtyping import Array, Float, PRNGKeyArray

from hyperpush.hypergradients.hgp import HGP
from hyperpush.inner.sgp import SGP
from hyperpush.networks import Network
from hyperpush.task import Task
from hyperpush.verbs import hypergradient, train


def sgp(task: Task, network: Network, key: PRNGKeyArray, step_size: float) -> Callable[[int], Float[Array, "n d"]]:
    """A function from a number of rounds to every client's params after them; full batch, gradient first."""

    def run(rounds: int) -> Float[Array, "n d"]:
        return jax.block_until_ready(train(task, SGP(rounds, step_size), network, key=key).params)

    return run


def hgp(
    task: Task, network: Network, key: PRNGKeyArray, pushes: int, step_size: float
) -> Callable[[int], Float[Array, "n d"]]:
    """A function from a number of steps to every client's hypergradient at the task's params; full batch."""

    def run(steps: int) -> Float[Array, "n d"]:
        return jax.block_until_ready(hypergradient(task, HGP(steps, pushes, step_size), network, key=key).value)

    return run
