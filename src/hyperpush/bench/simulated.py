"""SGP and HGP on the `simulate` engine, with the arguments and results of `loop.py`."""

from collections.abc import Callable

import jax
from jaxtyping import Array, Float, PRNGKeyArray

from hyperpush.data.batches import Data
from hyperpush.engine import simulate
from hyperpush.estimators.estimate import program_of, start
from hyperpush.estimators.hgp import HGP
from hyperpush.inner.sgp import SGP
from hyperpush.inner.step import Trained
from hyperpush.networks import Network
from hyperpush.problems.instance import Instance


def sgp(instance: Instance, network: Network, key: PRNGKeyArray, rate: float) -> Callable[[int], Float[Array, "n d"]]:
    """A function from a number of rounds to every client's parameters after them; full batch, gradient first."""
    data = Data(instance.inner_data, instance.outer_data)

    def run(rounds: int) -> Float[Array, "n d"]:
        program = program_of(SGP(rounds, rate), instance.problem)
        outcome = simulate.run(program, network, Trained(instance.params, instance.hypers), data, key)
        return jax.block_until_ready(outcome.states.params)

    return run


def hgp(
    instance: Instance, network: Network, key: PRNGKeyArray, pushes: int, step_size: float
) -> Callable[[int], Float[Array, "n d"]]:
    """A function from an order to every client's hyper-gradient at the instance's parameters; full batch."""
    data = Data(instance.inner_data, instance.outer_data)

    def run(order: int) -> Float[Array, "n d"]:
        program = program_of(HGP(order, pushes, step_size), instance.problem)
        outcome = simulate.run(program, network, start(instance.params, instance.hypers), data, key)
        return jax.block_until_ready(outcome.states.value)

    return run
