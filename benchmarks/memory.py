"""Memory of the hypergradient of a large model, all clients on one machine."""

from dataclasses import dataclass
from functools import partial
from itertools import product
from time import perf_counter
from typing import Any

import jax
from images import OfImages, images
from jaxtyping import PyTree
from script import Row, main, option
from timing import in_new_process, machine, measure_rows, peak_megabytes

import hyperpush as hp
from hyperpush.engines.compiled.compile import counting
from hyperpush.hypergradients.base import HypergradientEstimator, HypergradientState
from hyperpush.programs import Scope, Sequence, one_client, traced

ESTIMATORS: dict[str, HypergradientEstimator] = {
    "HGP": hp.HGP(2, 2, 0.01),
    "TrackedHGP": hp.TrackedHGP(10),
    "Automatic": hp.Automatic(),
}
CONVEX = 20.0  # an L2 rate that makes the mean Hessian positive definite, so that the default estimator converges


@dataclass(frozen=True)
class Memory(OfImages):
    """Memory of the hypergradient of a large model."""

    clients: int = option(20, "number of clients", 2)
    examples: int = option(32, "training images per client, and validation images", 1)
    batches: tuple[int, ...] = option((1, 0), "clients at a time; 0: all", 0)


def run(config: Memory) -> dict[str, Any]:
    """Measure every estimator with every batch, each in a separate process."""
    where = machine()
    cases = [partial(in_new_process, measure, config, *case) for case in product(ESTIMATORS, config.batches)]
    return {"memory": measure_rows(f"{config.clients} clients, {config.model}", cases), "machine": where}


def measure(config: Memory, method: str, batch: int) -> list[Row]:
    """Measure the size of all clients' states, the peak of resident memory, and the time after compilation."""
    row: Row = {"method": method, "batch": batch}

    def everything() -> None:
        task = images(config.model, config.clients, config.seed, config.examples).with_l2(CONVEX)
        network = hp.networks.RandomDirected(config.clients, seed=config.seed)
        parameters, numbers = state_sizes(task, ESTIMATORS[method], network)
        engine = hp.Simulate(clients_per_batch=batch or config.clients)

        def estimate() -> hp.Estimate:
            found = hp.hypergradient(task, ESTIMATORS[method], network, key=config.seed, engine=engine)
            jax.block_until_ready(found.value)
            return found

        with counting() as counts:
            estimate()  # compiles
        began = perf_counter()
        products = estimate().costs.hessian_products
        row.update(
            parameters=parameters,
            vectors=numbers // parameters,
            vectors_by_xla=counts.peak / (4 * config.clients * parameters),
            states_megabytes=4 * config.clients * numbers / 2**20,
            products=products,
            seconds_per_product=(perf_counter() - began) / products,
        )

    row["peak_megabytes"] = peak_megabytes(everything)
    return [row]


def state_sizes(task: hp.Task, estimator: HypergradientEstimator, network: hp.networks.Network) -> tuple[int, int]:
    """Count the numbers in one client's params, and in its state during the estimate."""
    program = estimator.bind(network).program(task.problem)
    if isinstance(program, Sequence):  # the nodes after the first only check the estimate
        program = program.nodes[0]
    assert isinstance(program, Scope)
    start = HypergradientState(task.params, task.hypers, task.hypers)
    state, _ = traced(program.enter, task.clients, *one_client((task.data, start)))
    return count(one_client(task.params)), count(state)


def count(tree: PyTree) -> int:
    """Count the numbers in a pytree."""
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


if __name__ == "__main__":
    main(Memory, run)
