"""A metric and a hook outside the package, and a task to try them on."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp

import hyperpush as hp


def absolute_error(params, hyper, batch):
    """Return |prediction − target| for each example."""
    inputs, targets = batch
    return jnp.abs(inputs @ params - targets)


class Keep(hp.hooks.Hook):
    """Keep the step of every recorded row, and write the steps to `path` if one is given."""

    def __init__(self, path: str = ""):
        self.path, self.steps = path, []

    def row(self, loop, step, values):
        self.steps.append(step)

    def finish(self):
        if self.path:
            Path(self.path).write_text(json.dumps(self.steps))


def loss(params, hyper, batch):
    inputs, targets = batch
    return (inputs @ params - targets) ** 2


def l2(params, hyper):
    return jnp.exp(hyper) * jnp.sum(params**2)


def ridge(clients: int = 4, seed: int = 0) -> hp.Task:
    """Return a least-squares task with a personal L2 rate for each client."""
    keys = jax.random.split(jax.random.key(seed))
    inputs = jax.random.normal(keys[0], (clients, 20, 3))
    targets = inputs @ jnp.arange(3.0) + jax.random.normal(keys[1], (clients, 20))
    train, validation = ((inputs[:, part], targets[:, part]) for part in (slice(0, 8), slice(8, 20)))
    return hp.Task(
        inner=loss, penalty=l2, outer=loss, params=jnp.zeros(3), hypers=-1.0, train=train, validation=validation
    )
