"""Gain by a second process: time of a round of training a large model, and memory of each process."""

import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any

import jax
import jax.numpy as jnp
from images import OfImages, images
from script import Row, main, option
from timing import machine, measure_rows, peak_megabytes

import hyperpush as hp
from hyperpush.base import processes
from hyperpush.base.errors import HyperpushError, InvalidInput
from hyperpush.base.processes.starter import end_with_parent, start
from hyperpush.hypergradients.base import HypergradientState
from hyperpush.inner.base import InnerState
from hyperpush.programs import program_of

Parts = list[dict[str, Any]]  # measurements of each process


@dataclass(frozen=True)
class Scale(OfImages):
    """Gain by a second process: time and memory of a large model."""

    method: str = option("sgp", "a round of SGP, or of TrackedHGP", choices=("sgp", "tracked"))
    clients: int = option(8, "number of clients, which the processes divide", 1)
    batch: int = option(128, "images per client and round", 1)
    rounds: int = option(10, "rounds of one measurement; work done once per run is spread over them", 1)
    turns: int = option(3, "starts of each number of processes, in turn; the median is taken", 1)
    processes: tuple[int, ...] = option((1, 2), "numbers of processes, each on one core", 1)


def run(config: Scale) -> dict[str, Any]:
    """Return a row for every number of processes."""
    numbers = tuple(dict.fromkeys(config.processes))
    for count in numbers:
        if config.clients % count:
            raise InvalidInput("clients", config.clients, f"a multiple of the {count} processes")
    where = machine()
    title = f"a round of {config.method}, each process on one core"
    return {"scale": measure_rows(title, [partial(compare, config, numbers)]), "machine": where}


def compare(config: Scale, numbers: Sequence[int]) -> list[Row]:
    """Return the rows, each with its speedup over the first."""
    turns = {count: list[Parts]() for count in numbers}
    for _ in range(config.turns):  # in turn: a machine's speed changes from minute to minute
        for count, found in turns.items():
            found.append(measure_all(config, count))
    rows = [time_row(config, *each) for each in turns.items()]
    # Processor time excludes other work and waiting, so it is more reliable on a busy machine.
    speedups = {"speedup": "seconds", "cpu_speedup": "cpu_seconds"}
    return [row | {name: rows[0][seconds] / row[seconds] for name, seconds in speedups.items()} for row in rows]


def time_row(config: Scale, count: int, turns: list[Parts]) -> Row:
    """Return the time of a round in the slowest process, and the memory of the largest one."""

    def per_round(name: str) -> float:
        return median(max(part[name] for part in parts) for parts in turns) / config.rounds

    return {
        "processes": count,
        "clients": config.clients,
        "seconds": per_round("seconds"),
        "cpu_seconds": per_round("cpu_seconds"),  # of one process
        "peak_megabytes": max(part["peak"] for parts in turns for part in parts),
    }


def measure_all(config: Scale, count: int) -> Parts:
    """Return the measurements of `count` new processes, each on one core."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    with tempfile.TemporaryDirectory() as folder:
        asked = [json.dumps(asdict(config)), str(count), folder]
        os.environ["PYTHONPATH"] = str(Path(__file__).parent)  # so that a new process finds this module
        try:
            if cores:
                os.sched_setaffinity(0, cores[:count])
            code = start(asked, count, "scale:take_part")
        finally:
            if cores:
                os.sched_setaffinity(0, cores)
        if code:
            raise HyperpushError(f"bench scale: {count} processes ended with exit code {code}")
        return [json.loads((Path(folder) / str(index)).read_text()) for index in range(count)]


def take_part() -> None:
    """Run one of the measured processes; an error is printed as one line."""
    end_with_parent()
    config, count, folder, _, coordinator, _, index = sys.argv[1:]
    try:
        if int(count) > 1:
            processes.join(coordinator, int(count), int(index))
        found = measure(Scale(**json.loads(config)))
        (Path(folder) / index).write_text(json.dumps(found))
        processes.barrier("written")
    except HyperpushError as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        sys.exit(2)


def measure(config: Scale) -> dict[str, Any]:
    """Prepare, compile and measure, in one of the processes."""
    found: dict[str, Any] = {}

    def everything() -> None:
        work = prepare(config)
        work()  # compiles
        processes.barrier("compiled")
        began, worked = perf_counter(), process_time()
        work()
        found["seconds"], found["cpu_seconds"] = perf_counter() - began, process_time() - worked

    found["peak"] = peak_megabytes(everything) or 0.0
    return found


def prepare(config: Scale) -> Callable[[], None]:
    """Return a function that runs `rounds` rounds of all clients; each process makes data of its own clients."""
    task = images(config.model, config.clients, config.seed, config.batch, validation=1, spread=True)
    network, key = hp.networks.RandomDirected(config.clients, seed=config.seed), jax.random.key(config.seed)
    if config.method == "sgp":
        method, states = hp.SGP(config.rounds, 0.01, "gradient-after"), InnerState(task.params, task.hypers)
    else:
        method = hp.TrackedHGP(config.rounds, 0.01, pushes=1, tolerance=None, acceleration=1)
        states = HypergradientState(task.params, task.hypers, jax.tree.map(jnp.zeros_like, task.hypers))
    program, engine = program_of(method.bind(network), task.problem), hp.Shard(clients_per_batch=1)

    def work() -> None:
        jax.block_until_ready(engine.run(program, network, states, task.data, key).states)

    return work


if __name__ == "__main__":
    main(Scale, run)
