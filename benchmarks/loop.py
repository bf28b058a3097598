"""SGP and HGP as a loop over clients in Python, without an engine.

Each client's gradients and products are compiled once and called client by client. One compiled call per push draws the
network and mixes all messages. The loop waits for results only at the end.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from hyperpush.engines import keys
from hyperpush.networks import Network, matrix
from hyperpush.task.task import Task

_stack = jax.jit(jnp.stack)


def sgp(task: Task, network: Network, key: PRNGKeyArray, step_size: float) -> Callable[[int], Float[Array, "n d"]]:
    """Return a function from a number of rounds to every client's params after them; full batch, gradient first."""
    gradient = jax.jit(task.problem.inner_gradient)
    params, hypers, batches = _by_client(task.params, task.hypers, task.train)

    @jax.jit
    def push(step, z, gradients, mass):
        weights = matrix(network, keys.network_key(key), step)
        stacked, mass = weights @ (jnp.stack(z) - step_size * jnp.stack(gradients)), weights @ mass
        return list(stacked), list(stacked / mass[:, None]), mass

    def run(rounds: int) -> Float[Array, "n d"]:
        z, x, mass = params, params, jnp.ones(network.clients)
        for step in range(rounds):
            gradients = [gradient(*own) for own in zip(x, hypers, batches, strict=True)]
            z, x, mass = push(step, z, gradients, mass)
        return jax.block_until_ready(_stack(x))

    return run


def hgp(
    task: Task, network: Network, key: PRNGKeyArray, pushes: int, step_size: float
) -> Callable[[int], Float[Array, "n d"]]:
    """Return a function from a number of steps to every client's hypergradient at the task's params; full batch."""
    params, hypers, batches, validation = _by_client(task.params, task.hypers, task.train, task.validation)
    average = jax.jit(lambda total, mass: list(total / mass[:, None]))

    @jax.jit
    def begin(params, hyper, batch):
        gradients = task.problem.outer_gradients(params, hyper, batch)
        return jax.tree.map(lambda g: g / network.clients, gradients)

    @jax.jit
    def push(step, total, mass):
        weights = matrix(network, keys.network_key(key), step)
        return weights @ total, weights @ mass

    @jax.jit
    def multiply(params, hyper, batch, u, v):
        along_x, along_hyper = task.problem.products(params, hyper, batch, u)
        return u - step_size * along_x, v - step_size * along_hyper

    def run(steps: int) -> Float[Array, "n d"]:
        u, v = zip(*(begin(*own) for own in zip(params, hypers, validation, strict=True)), strict=True)
        ones = jnp.ones(network.clients)
        for m in range(steps):
            total, mass = _stack(u), ones
            for step in range(m * pushes, (m + 1) * pushes):
                total, mass = push(step, total, mass)
            owned = zip(params, hypers, batches, average(total, mass), v, strict=True)
            u, v = zip(*(multiply(*own) for own in owned), strict=True)
        return jax.block_until_ready(_stack(v))

    return run


def _by_client(*stacked: Any) -> list[list[Any]]:
    """Split each tree, whose leaves have the clients on axis 0, into a list of one tree per client."""
    clients = jax.tree.leaves(stacked)[0].shape[0]
    return [[jax.tree.map(lambda leaf, i=i: leaf[i], tree) for i in range(clients)] for tree in stacked]
