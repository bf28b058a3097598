"""What a second process is worth: time of a round of training a large model, and memory of each process."""

import json
import os
import sys
import tempfile
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Annotated, Any, Literal

from pydantic import Field

from hyperpush.runs.config import Config
from hyperpush.runs.experiment import Experiment

Count = Annotated[int, Field(ge=1)]
Method = Literal["sgp", "tracked"]


class Scale(Config):
    """Options of the benchmark of several processes."""

    clients: Count = Field(default=8, description="Clients of the measurement of time; the processes divide them.")
    batch: Count = Field(default=128, description="Images per client and round, of the measurement of time.")
    rounds: Count = Field(
        default=10, description="Rounds of one measurement; what a run does once is spread over them."
    )
    repeats: Count = Field(default=2, description="Measurements by the same processes, of which the median is taken.")
    turns: Count = Field(
        default=3, description="How often each number of processes is started, in turn; the median is taken."
    )
    processes: tuple[Count, ...] = Field(
        default=(1, 2), min_length=1, description="Numbers of processes, each on one core."
    )
    memory_clients: int = Field(default=0, ge=0, description="Clients of the measurement of memory, 100 say; 0: none.")
    memory_examples: Count = Field(default=8, description="Images per client, of the measurement of memory.")
    methods: tuple[Method, ...] = Field(default=("sgp", "tracked"), description="Whose memory: SGP, TrackedHGP.")
    model: Literal["emnist", "influence"] = Field(
        default="emnist", description="A convolutional network of 2,278,334 parameters, or one of 13,750."
    )
    seed: int = Field(default=0, ge=0, description="Decides the model, the images and the network.")


def run_scale(config: Scale, run: Any) -> dict[str, Any]:
    """A row for every number of processes: first time, then memory by method."""
    from hyperpush.bench.timing import machine
    from hyperpush.errors import InvalidInput

    numbers = tuple(dict.fromkeys(config.processes))
    for name in ("clients", "memory_clients"):
        for processes in numbers:
            if getattr(config, name) % processes:
                raise InvalidInput(name, getattr(config, name), f"a multiple of the {processes} processes")
    where, rows, memory = machine(), [], []
    cases = len(numbers) * (config.turns + (len(config.methods) if config.memory_clients else 0))
    with run.progress("processes", cases) as bar:
        by_processes: dict[int, list[list[dict[str, Any]]]] = {processes: [] for processes in numbers}
        for _ in range(config.turns):  # in turn: a machine's speed changes from minute to minute
            for processes, turns in by_processes.items():
                turns.append(measured(config, "sgp", config.clients, config.batch, processes, config.repeats))
                bar.advance()
        for processes, turns in by_processes.items():
            rows.append(
                {
                    "processes": processes,
                    "clients": config.clients,
                    "seconds": median(max(part["seconds"] for part in parts) for parts in turns) / config.rounds,
                    # Of one process.
                    "cpu_seconds": median(max(part["cpu_seconds"] for part in parts) for parts in turns)
                    / config.rounds,
                    "megabytes_moved_per_round": turns[0][0]["moved"] / config.rounds / 2**20,
                }
            )
            rows[-1]["speedup"] = rows[0]["seconds"] / rows[-1]["seconds"]
            # What it would be if nothing else ran and nobody waited: says more on a machine that is busy.
            rows[-1]["cpu_speedup"] = rows[0]["cpu_seconds"] / rows[-1]["cpu_seconds"]
            run.record(**rows[-1])
        for method in config.methods if config.memory_clients else ():
            for processes in numbers:
                parts = measured(config, method, config.memory_clients, config.memory_examples, processes, 1)
                memory.append(
                    {
                        "method": method,
                        "processes": processes,
                        "clients": config.memory_clients,
                        "peak_megabytes": max(part["peak"] for part in parts),
                        "peak_megabytes_of_all": sum(part["peak"] for part in parts),
                        "seconds": max(part["seconds"] for part in parts) / config.rounds,
                    }
                )
                run.record(**memory[-1])
                bar.advance()
    for title, found in (("a round of SGP, each process on one core", rows), ("memory of a process", memory)):
        if found:
            columns = [name.replace("megabytes", "MB").replace("_", " ") for name in found[0]]
            run.table(title, columns, [list(row.values()) for row in found])
    return {"scale": rows, "memory": memory, "machine": where}


def measured(
    config: Scale, method: Method, clients: int, examples: int, processes: int, repeats: int
) -> list[dict[str, Any]]:
    """What each of so many new processes found."""
    from hyperpush.errors import HyperpushError
    from hyperpush.processes.starter import start

    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    with tempfile.TemporaryDirectory() as folder:
        asked = {"method": method, "clients": clients, "examples": examples, "repeats": repeats, "folder": folder}
        asked |= {"processes": processes, "rounds": config.rounds, "model": config.model, "seed": config.seed}
        try:
            if cores:
                os.sched_setaffinity(0, cores[:processes])  # one core for each
            code = start([json.dumps(asked)], processes, "hyperpush.bench.scale:take_part")
        finally:
            if cores:
                os.sched_setaffinity(0, cores)
        if code:
            raise HyperpushError(f"bench scale: {processes} processes ended with exit code {code}")
        return [json.loads((Path(folder) / str(index)).read_text()) for index in range(processes)]


def take_part() -> None:
    """One of the processes that are measured; an error is one line."""
    from hyperpush.errors import HyperpushError
    from hyperpush.processes.starter import end_with_parent

    end_with_parent()
    try:
        measure(json.loads(sys.argv[1]), coordinator=sys.argv[3], index=sys.argv[5])
    except HyperpushError as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        sys.exit(2)


def measure(asked: dict[str, Any], coordinator: str, index: str) -> None:
    """Prepare, compile, measure, and write down what was found."""
    from hyperpush import processes
    from hyperpush.bench.timing import peak_megabytes

    if asked["processes"] > 1:
        processes.join(coordinator, asked["processes"], int(index))
    found: dict[str, Any] = {}

    def everything() -> None:
        task = prepare(asked)
        task()  # compiles
        processes.barrier("compiled")
        times, busy = [], []
        for _ in range(asked["repeats"]):
            began, worked = perf_counter(), process_time()
            found["moved"] = task()
            times.append(perf_counter() - began)
            busy.append(process_time() - worked)
        found["seconds"], found["cpu_seconds"] = median(times), median(busy)

    found["peak"] = peak_megabytes(everything) or 0.0
    (Path(asked["folder"]) / index).write_text(json.dumps(found))
    processes.barrier("written")


def prepare(asked: dict[str, Any]) -> Any:
    """A task of `rounds` rounds of all clients, which returns the bytes moved; each process makes its own clients'."""
    import jax
    import jax.numpy as jnp

    import hyperpush as hp
    from hyperpush.bench.images import images
    from hyperpush.programs import HypergradientState, InnerState, program_of

    clients, rounds, seed = asked["clients"], asked["rounds"], asked["seed"]
    task = images(asked["model"], clients, seed, asked["examples"], validation=1, spread=True)
    network, key = hp.networks.RandomDirected(clients, seed=seed), jax.random.key(seed)
    if asked["method"] == "sgp":
        method: Any = hp.SGP(rounds, 0.01, "gradient-after")
        states: Any = InnerState(task.params, task.hypers)
    else:
        method = hp.TrackedHGP(rounds, 0.01, pushes=1, tolerance=None, acceleration=1)
        states = HypergradientState(task.params, task.hypers, jax.tree.map(jnp.zeros_like, task.hypers))
    program, engine = program_of(method.on(network), task.problem), hp.Shard(clients_per_batch=1)

    def measured_task() -> int:
        found = engine.run(program, network, states, task.data, key)
        jax.block_until_ready(found.states)
        return found.moved

    return measured_task


BENCH = Experiment("scale", "What a second process is worth: time and memory of a large model.", Scale, run_scale)
