"""Speed of training a large model: rounds of SGP and of HGP, relative to the speed of a large matrix product."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from statistics import median
from time import perf_counter
from typing import Any

import jax
import jax.numpy as jnp
from images import NETWORKS, OfImages, images
from script import Row, main, option
from timing import exponent, machine, measure_rows, peak_megabytes

import hyperpush as hp
from hyperpush.hypergradients.base import HypergradientEstimator
from hyperpush_papers.common.models.cnn import CNN

PRODUCT = 3000  # rows and columns of its matrices
Case = tuple[str, int, Callable[[], None]]  # name, operations per round of all clients, and the rounds


@dataclass(frozen=True)
class Training(OfImages):
    """Speed of training a large model, as a share of a matrix product's."""

    clients: tuple[int, ...] = option((10, 20, 40), "numbers of clients", 2)
    batch: int = option(128, "images per client and round", 1)
    rounds: int = option(6, "rounds of one measurement; work done once per run is spread over them", 1)
    repeats: int = option(3, "measurements, of which the median is taken", 1)


def run(config: Training) -> dict[str, Any]:
    """Time SGP and HGP for every number of clients."""
    where, before = machine(), dict[str, tuple[int, float]]()
    cases = [partial(measure, config, clients, before) for clients in config.clients]
    return {"training": measure_rows(f"{config.model}, batch {config.batch}", cases), "machine": where}


def measure(config: Training, clients: int, before: dict[str, tuple[int, float]]) -> list[Row]:
    """Return a row for each kind of round, with the matrix product measured before and after each.

    `before` holds the clients and seconds of each kind for the previous number of clients.
    """
    cases = prepare(config, clients)
    peaks = [peak_megabytes(task) for _, _, task in cases]  # compiles, too
    times: list[list[float]] = [[] for _ in cases]
    speeds = []
    for _ in range(config.repeats):
        speeds += [product_speed() for _ in range(3)]
        for own, (_, _, task) in zip(times, cases, strict=True):
            own.append(seconds_of(task) / config.rounds)
    speed = median([*speeds, *(product_speed() for _ in range(3))])
    rows = []
    for (label, operations, _), seconds, peak in zip(cases, map(median, times), peaks, strict=True):
        gflops = operations / seconds / 1e9
        row = {"round": label, "clients": clients, "seconds": seconds, "gflops": gflops, "product_gflops": speed}
        growth = exponent(before[label], (clients, seconds)) if label in before else None
        rows.append({**row, "share": gflops / speed, "exponent": growth, "peak_megabytes": peak})
        before[label] = clients, seconds
    jax.clear_caches()
    return rows


def operations_of(model: CNN) -> int:
    """Count the operations of one image's logits in convolutions and dense layers: 2 per weight and place."""
    total, side, depth = 0, model.size, model.colors
    for channels in model.channels:
        side = side - model.kernel + 1
        total += 2 * side**2 * model.kernel**2 * depth * channels
        side, depth = side // 2, channels
    units = (side**2 * depth, *model.hidden, model.classes)
    return total + sum(2 * a * b for a, b in pairwise(units))


def prepare(config: Training, clients: int) -> list[Case]:
    """Return the cases: SGP, and HGP with every number of pushes.

    A gradient takes three times the operations of the logits (forward; backward to inputs and to weights). A product
    with the second derivative takes six times: the same again along the direction. Mixing is not counted.
    """
    # The outer cost is not measured, so one image is enough.
    task = images(config.model, clients, config.seed, config.batch, validation=1)
    network = hp.networks.RandomDirected(clients, seed=config.seed)
    options: Any = {"key": config.seed, "engine": hp.Simulate(clients_per_batch=1)}

    def train() -> None:
        jax.block_until_ready(hp.train(task, hp.SGP(config.rounds, 0.01, "gradient-after"), network, **options).params)

    def estimate(estimator: HypergradientEstimator) -> None:
        jax.block_until_ready(hp.hypergradient(task, estimator, network, **options).value)

    forward = operations_of(NETWORKS[config.model]) * clients * config.batch
    estimators = {f"HGP, S = {pushes}": hp.HGP(config.rounds, pushes, 0.01) for pushes in (1, 10)}
    estimates = [(name, 6 * forward, partial(estimate, each)) for name, each in estimators.items()]
    return [("SGP", 3 * forward, train), *estimates]


def product_speed() -> float:
    """Return GFLOP/s of a product of two large square float32 matrices."""
    a = jnp.ones((PRODUCT, PRODUCT), jnp.float32)
    multiply = jax.jit(jnp.matmul)
    jax.block_until_ready(multiply(a, a))
    return 2 * PRODUCT**3 / seconds_of(lambda: jax.block_until_ready(multiply(a, a))) / 1e9


def seconds_of(work: Callable[[], Any]) -> float:
    """Return the seconds that a function takes."""
    began = perf_counter()
    work()
    return perf_counter() - began


if __name__ == "__main__":
    main(Training, run)
