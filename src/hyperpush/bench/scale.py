"""What a second process is worth: time of a round of training a large model, and memory of each process."""

import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any

import jax
import jax.numpy as jnp

import hyperpush as hp
from hyperpush import processes
from hyperpush.bench.config import Scale, Trained
from hyperpush.bench.images import images
from hyperpush.bench.timing import machine, peak_megabytes, show
from hyperpush.errors import HyperpushError, InvalidInput
from hyperpush.processes.starter import end_with_parent, start
from hyperpush.programs import HypergradientState, InnerState, program_of
from hyperpush.runs.run import StudyRun

Parts = list[dict[str, Any]]  # what each process found


def run(config: Scale, run: StudyRun) -> dict[str, Any]:
    """A row for every number of processes: first time, then memory by method."""
    numbers = tuple(dict.fromkeys(config.processes))
    for name in ("clients", "memory_clients"):
        for count in numbers:
            if getattr(config, name) % count:
                raise InvalidInput(name, getattr(config, name), f"a multiple of the {count} processes")
    methods = config.methods if config.memory_clients else ()
    where, rows, memory = machine(), [], []
    with run.progress("processes", len(numbers) * (config.turns + len(methods))) as bar:
        by_number: dict[int, list[Parts]] = {count: [] for count in numbers}
        for _ in range(config.turns):  # in turn: a machine's speed changes from minute to minute
            for count, turns in by_number.items():
                turns.append(measure_all(config, "sgp", config.clients, config.batch, count, config.repeats))
                bar.advance()
        for count, turns in by_number.items():
            rows.append(time_row(config, count, turns))
            rows[-1]["speedup"] = rows[0]["seconds"] / rows[-1]["seconds"]
            # What it would be if nothing else ran and nobody waited: says more on a machine that is busy.
            rows[-1]["cpu_speedup"] = rows[0]["cpu_seconds"] / rows[-1]["cpu_seconds"]
            run.record(**rows[-1])
        for method in methods:
            for count in numbers:
                parts = measure_all(config, method, config.memory_clients, config.memory_examples, count, 1)
                memory.append(memory_row(config, method, count, parts))
                run.record(**memory[-1])
                bar.advance()
    show(run, "a round of SGP, each process on one core", rows)
    show(run, "memory of a process", memory)
    return {"scale": rows, "memory": memory, "machine": where}


def time_row(config: Scale, count: int, turns: list[Parts]) -> dict[str, Any]:
    """The time of a round, that of the slowest process."""

    def per_round(name: str) -> float:
        return median(max(part[name] for part in parts) for parts in turns) / config.rounds

    return {
        "processes": count,
        "clients": config.clients,
        "seconds": per_round("seconds"),
        "cpu_seconds": per_round("cpu_seconds"),  # of one process
    }


def memory_row(config: Scale, method: Trained, count: int, parts: Parts) -> dict[str, Any]:
    """The memory of the largest process, and of all."""
    return {
        "method": method,
        "processes": count,
        "clients": config.memory_clients,
        "peak_megabytes": max(part["peak"] for part in parts),
        "peak_megabytes_of_all": sum(part["peak"] for part in parts),
        "seconds": max(part["seconds"] for part in parts) / config.rounds,
    }


def measure_all(config: Scale, method: Trained, clients: int, examples: int, count: int, repeats: int) -> Parts:
    """What each of so many new processes found, each on a core of its own."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    with tempfile.TemporaryDirectory() as folder:
        asked = {"method": method, "clients": clients, "examples": examples, "repeats": repeats, "folder": folder}
        asked |= {"processes": count, "rounds": config.rounds, "model": config.model, "seed": config.seed}
        try:
            if cores:
                os.sched_setaffinity(0, cores[:count])
            code = start([json.dumps(asked)], count, "hyperpush.bench.scale:take_part")
        finally:
            if cores:
                os.sched_setaffinity(0, cores)
        if code:
            raise HyperpushError(f"bench scale: {count} processes ended with exit code {code}")
        return [json.loads((Path(folder) / str(index)).read_text()) for index in range(count)]


def take_part() -> None:
    """One of the processes that are measured; an error is one line."""
    end_with_parent()
    try:
        measure(json.loads(sys.argv[1]), coordinator=sys.argv[3], index=sys.argv[5])
    except HyperpushError as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        sys.exit(2)


def measure(asked: dict[str, Any], coordinator: str, index: str) -> None:
    """Prepare, compile, measure, and write down what was found."""
    if asked["processes"] > 1:
        processes.join(coordinator, asked["processes"], int(index))
    found: dict[str, Any] = {}

    def everything() -> None:
        work = prepare(asked)
        work()  # compiles
        processes.barrier("compiled")
        times, busy = [], []
        for _ in range(asked["repeats"]):
            began, worked = perf_counter(), process_time()
            work()
            times.append(perf_counter() - began)
            busy.append(process_time() - worked)
        found["seconds"], found["cpu_seconds"] = median(times), median(busy)

    found["peak"] = peak_megabytes(everything) or 0.0
    (Path(asked["folder"]) / index).write_text(json.dumps(found))
    processes.barrier("written")


def prepare(asked: dict[str, Any]) -> Callable[[], None]:
    """What runs `rounds` rounds of all clients; each process makes its own clients'."""
    clients, rounds, seed = asked["clients"], asked["rounds"], asked["seed"]
    task = images(asked["model"], clients, seed, asked["examples"], validation=1, spread=True)
    network, key = hp.networks.RandomDirected(clients, seed=seed), jax.random.key(seed)
    if asked["method"] == "sgp":
        method, states = hp.SGP(rounds, 0.01, "gradient-after"), InnerState(task.params, task.hypers)
    else:
        method = hp.TrackedHGP(rounds, 0.01, pushes=1, tolerance=None, acceleration=1)
        states = HypergradientState(task.params, task.hypers, jax.tree.map(jnp.zeros_like, task.hypers))
    program, engine = program_of(method.on(network), task.problem), hp.Shard(clients_per_batch=1)

    def work() -> None:
        jax.block_until_ready(engine.run(program, network, states, task.data, key).states)

    return work
