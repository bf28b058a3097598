"""Asynchronous peers that are killed and restarted, or stopped for a while, beside busy processes and without.

    python benchmarks/restarts.py

Each cell is a run of four parties in separate processes. One of them is disturbed at a random round. The result is
compared with undisturbed runs: hypers with their mean, params with their spread. Several cells run at a time, because
a run whose party is stopped only waits. Finished cells are kept as JSON lines, and the same command continues with the
missing ones.
"""

import json
import math
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from script import main, option, show
from timing import machine

import hyperpush as hp
from hyperpush.base import settings
from hyperpush.base.errors import HyperpushError
from hyperpush.base.processes.starter import free_ports
from hyperpush.deploy.swarm import Processes
from hyperpush.deploy.watch import STATUS, StatusFile
from hyperpush.tasks.logistic import logistic

NAMES = ("alice", "bob", "carol", "dave")
STEPS = 150
HYPERS = 2e-3  # allowed difference of hypers from an undisturbed run
SPREADS = 3.0  # allowed difference of params, in spreads of undisturbed runs
LONGEST = 1800.0  # seconds after which a run is given up
DATA = Path(__file__).parents[1] / "docs" / "results" / "data" / "restarts.jsonl"
Cell = dict[str, Any]


@dataclass(frozen=True)
class Restarts:
    """Disturbed runs against undisturbed ones."""

    restarts: int = option(20, "runs in which a party is killed and started again at once", 0)
    stops: int = option(20, "runs in which a party is stopped for a while", 0)
    undisturbed: int = option(6, "undisturbed runs", 2)
    stopped_seconds: float = option(20.0, "seconds for which a party is stopped", 0.1)
    busy: int = option(20, "busy processes beside half of the runs", 0)
    at_once: int = option(3, "runs at a time", 1)
    out: str = option(str(DATA), "file of finished cells")


def run(config: Restarts) -> dict[str, Any]:
    """Run the missing cells, first those without busy processes, and compare."""
    out = Path(config.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    done = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    missing = [each for each in wanted(config) if not any(each.items() <= cell.items() for cell in done)]
    for busy in sorted({each["busy"] for each in missing}):
        with beside(busy):
            for cell in measure(config, [each for each in missing if each["busy"] == busy]):
                done.append(cell)
                with out.open("a") as file:
                    file.write(json.dumps(cell) + "\n")
    rows = compare(done)
    columns = ("kind", "beside", "runs", "without a model", "marked", "hypers off", "params off, in spreads")
    show("asynchronous parties", columns, rows)
    return {"rows": rows, "cells": len(done), "machine": machine()}


def wanted(config: Restarts) -> list[Cell]:
    """Return all cells: of each kind half beside busy processes."""
    kinds = {"undisturbed": config.undisturbed, "restart": config.restarts, "stop": config.stops}
    return [
        {
            "kind": kind,
            "busy": config.busy if number % 2 and kind != "undisturbed" else 0,
            "number": number,
            "steps": STEPS,
        }
        for number in range(max(kinds.values()))
        for kind, count in kinds.items()
        if number < count
    ]


@contextmanager
def beside(count: int) -> Iterator[None]:
    """Keep cores busy with so many processes in the block."""
    busy = [multiprocessing.Process(target=work, daemon=True) for _ in range(count)]
    for each in busy:
        each.start()
    try:
        yield
    finally:
        for each in busy:
            each.terminate()


def work() -> None:
    """Keep a core busy."""
    while True:
        sum(range(10_000))


def party(name: str, base: str, ports: list[int]) -> None:
    """Run one party."""
    settings.keep_compiled_code()  # a party that is started again compiles nothing
    folder = Path(base) / name
    folder.mkdir(exist_ok=True)
    addresses = {each: f"127.0.0.1:{port}" for each, port in zip(NAMES, ports, strict=True)}
    task = logistic(len(NAMES), 0, log_rates=True).replace(names=NAMES).for_client(name)
    method = hp.PDBO(
        inner=hp.SGP(steps=STEPS, step_size=0.5),
        hypergradient=hp.TrackedHGP(steps=20, pushes=2, step_size=0.5, tolerance=None),
        outer=hp.optimizer("sgd", learning_rate=1.0),
        steps=2,
    )
    files: list[StatusFile] = []

    def watch(session: Any) -> None:
        files.append(StatusFile(folder / STATUS, session.status, every=0.05))
        files[0].start()

    options = {"mode": "asynchronous", "close_after": 120.0, "longest_wait": 1.0, "patience": 240.0}
    engine = hp.Peers(name, addresses, tls=False, checkpoint=folder / "checkpoint", on_start=watch, **options)
    network = hp.networks.FullyConnected(len(NAMES))
    found = hp.solve(task, method, network, key=0, engine=engine, certify=False)
    leaves = [
        np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(each)]) for each in (found.params, found.hypers)
    ]
    numbers = [[round(float(value), 7) for value in each] for each in leaves]
    (folder / "found.json").write_text(json.dumps([*numbers, str(found.status)]))


def measure(config: Restarts, cells: list[Cell]) -> Iterator[Cell]:
    """Yield the finished cells; some run at a time."""
    waiting, running = list(cells), list[Swarm]()
    try:
        while waiting or running:
            while waiting and len(running) < config.at_once:
                running.append(Swarm(waiting.pop(0), config.stopped_seconds))
            time.sleep(0.02)
            for swarm in [each for each in running if each.look()]:
                running.remove(swarm)
                yield swarm.finish()
    finally:
        for swarm in running:
            swarm.end()


class Swarm:
    """Four parties, one of which is disturbed at its round."""

    def __init__(self, cell: Cell, seconds: float):
        random = np.random.default_rng([cell["number"], len(cell["kind"])])
        self.cell, self.seconds = cell, seconds
        self.victim, self.at = str(random.choice(NAMES)), int(random.integers(5, 2 * STEPS))
        self.folder = tempfile.TemporaryDirectory()
        self.base, self.until = Path(self.folder.name), time.monotonic() + LONGEST
        self.processes = Processes(self.base, party, (self.folder.name, free_ports(len(NAMES))))
        self.disturbed = cell["kind"] == "undisturbed"
        self.stopped: tuple[int, float] | None = None  # a process, and the time of its continuation
        for name in NAMES:
            self.processes.start(name)

    def look(self) -> bool:
        """Disturb the victim when it is time; return True if all parties have ended."""
        self.processes.reap()
        if self.stopped is not None and time.monotonic() > self.stopped[1]:
            os.kill(self.stopped[0], signal.SIGCONT)
            self.stopped = None
        victim = self.processes.running.get(self.victim)
        due = not self.disturbed and self.processes.status(self.victim).get("round", 0) >= self.at
        if due and victim is not None:
            self.disturb(victim.pid)
        return not self.processes.running or time.monotonic() > self.until

    def disturb(self, pid: int | None) -> None:
        """Kill the victim and start it again, or stop it for a while."""
        self.disturbed = True
        if self.cell["kind"] == "restart":
            self.processes.kill(self.victim)
            self.processes.start(self.victim)
        elif pid is not None:
            os.kill(pid, signal.SIGSTOP)
            self.stopped = pid, time.monotonic() + self.seconds

    def finish(self) -> Cell:
        """Return the finished cell."""
        self.end()
        if 1 in self.processes.ends.values():
            raise HyperpushError("a party failed without a disturbance; see above")
        found = {}
        for name in NAMES:
            path = self.base / name / "found.json"
            found[name] = json.loads(path.read_text()) if path.exists() else None
        self.folder.cleanup()
        about = {"victim": self.victim, "round": self.at, "disturbed": self.disturbed, "ends": self.processes.ends}
        return {**self.cell, **about, "found": found}

    def end(self) -> None:
        """End all processes."""
        if self.stopped is not None:
            os.kill(self.stopped[0], signal.SIGCONT)
        self.processes.stop()


def compare(cells: list[Cell]) -> list[tuple[Any, ...]]:
    """Return a row for each kind: number of runs, number of divergences, and the largest differences."""
    calm = [arrays(each) for each in cells if each["kind"] == "undisturbed"]
    params, hypers = (np.stack([each[place] for each in calm]) for place in (0, 1))
    spread = float(np.abs(params - params.mean(0)).max())
    rows = []
    for kind, beside in sorted(
        {(each["kind"], each["busy"]) for each in cells}, key=lambda each: (each[0] != "undisturbed", each)
    ):
        own = [each for each in cells if (each["kind"], each["busy"]) == (kind, beside)]
        whole = [arrays(each) for each in own if None not in each["found"].values()]
        off = [np.abs(each[1] - hypers.mean(0)).max() for each in whole]
        away = [np.abs(each[0] - params.mean(0)).max() / spread for each in whole]
        marked = sum(any(each[2].startswith("!") for each in cell["found"].values() if each) for cell in own)
        rows.append((kind, f"{beside} busy", len(own), len(own) - len(whole), marked, most(off), most(away)))
    return rows


def arrays(cell: Cell) -> tuple[np.ndarray, np.ndarray]:
    """Return params and hypers of all parties."""
    found = [cell["found"][name] for name in NAMES]
    return np.array([each[0] for each in found]), np.array([each[1] for each in found])


def most(values: list[float]) -> float:
    """Return the largest value; infinity if there is none."""
    return float(max(values, default=math.inf))


if __name__ == "__main__":
    main(Restarts, run)
