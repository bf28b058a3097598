"""How much memory the hypergradient of a large model takes, all clients on one machine."""

from collections.abc import Callable
from time import perf_counter
from typing import Any, NamedTuple

import jax
from jaxtyping import PyTree

import hyperpush as hp
from hyperpush.bench.config import Estimated, Memory
from hyperpush.bench.images import images
from hyperpush.bench.timing import in_new_process, machine, peak_megabytes, show
from hyperpush.programs import HypergradientState, Scope, one_client, traced
from hyperpush.runs.run import StudyRun

STEP_SIZE = 0.01  # where it is given


class Case(NamedTuple):
    """An estimate to be made, and the numbers in the clients' states meanwhile."""

    parameters: int  # of each client
    numbers: int  # in the state of each client
    estimate: Callable[[], hp.Estimate]


def run(config: Memory, run: StudyRun) -> dict[str, Any]:
    """Measure every method with every batch."""
    where, rows = machine(), []
    with run.progress("memory", len(config.methods) * len(config.batches)) as bar:
        for method in config.methods:
            for batch in config.batches:
                rows.append(in_new_process(measure, config, method, batch))
                run.record(**rows[-1])
                bar.advance()
    show(run, f"{config.clients} clients, {config.model}", rows)
    return {"memory": rows, "machine": where}


def measure(config: Memory, method: Estimated, batch: int) -> dict[str, Any]:
    """What the states of all clients take, the most that was resident from start to end, and the time once compiled."""
    row: dict[str, Any] = {"method": method, "batch": batch}

    def everything() -> None:
        case = prepare(config, method, batch or None)
        case.estimate()  # compiles
        began = perf_counter()
        products = case.estimate().costs.hessian_products
        seconds = perf_counter() - began
        row["parameters"] = case.parameters
        row["vectors"] = case.numbers // case.parameters
        row["states_megabytes"] = 4 * config.clients * case.numbers / 2**20
        row["products"] = products
        row["seconds_per_product"] = seconds / products

    row["peak_megabytes"] = peak_megabytes(everything)
    return row


def prepare(config: Memory, method: Estimated, batch: int | None) -> Case:
    """The hypergradient by scales of the logits, one for each class and client, on random images."""
    task = images(config.model, config.clients, config.seed, config.examples)
    network = hp.networks.RandomDirected(config.clients, seed=config.seed)
    estimator = {
        "hgp": hp.HGP(config.steps, config.pushes, STEP_SIZE),
        "tracked": hp.TrackedHGP(config.steps, STEP_SIZE, pushes=1, tolerance=None, acceleration=1),
        "automatic": hp.TrackedHGP(config.automatic_steps),
    }[method]

    def estimate() -> hp.Estimate:
        engine = hp.Simulate(clients_per_batch=batch)
        done = hp.hypergradient(task, estimator, network, key=config.seed, engine=engine)
        jax.block_until_ready(done.value)
        return done

    program = estimator.on(network).program(task.problem)
    assert isinstance(program, Scope)
    start = HypergradientState(task.params, task.hypers, task.hypers)
    state, _ = traced(program.enter, config.clients, *one_client((task.data, start)))
    return Case(count(one_client(task.params)), count(state), estimate)


def count(tree: PyTree) -> int:
    """The numbers in a pytree."""
    return sum(leaf.size for leaf in jax.tree.leaves(tree))
