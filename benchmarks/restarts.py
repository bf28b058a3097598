"""Asynchronous peers that are killed and restarted, or stopped for a while, beside busy processes and without.

Each cell is a run of four parties in separate processes. One of them is disturbed at a random round. The result is
compared with undisturbed runs: hypers with their mean, params with their spread. Finished cells are kept as JSON lines,
and the same command continues with the missing ones.
"""

import json
import math
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from script import main, option, show
from timing import machine

import hyperpush as hp
from hyperpush.base.errors import HyperpushError
from hyperpush.base.processes.starter import free_ports
from hyperpush.deploy.swarm import Processes
from hyperpush.deploy.watch import STATUS, StatusFile
from hyperpush.tasks.logistic import logistic

NAMES = ("alice", "bob", "carol", "dave")
STEPS = 250
HYPERS = 2e-3  # allowed difference of hypers from an undisturbed run
SPREADS = 3.0  # allowed difference of params, in spreads of undisturbed runs
Cell = dict[str, Any]


@dataclass(frozen=True)
class Restarts:
    """Disturbed runs against undisturbed ones."""

    restarts: int = option(20, "runs in which a party is killed and started again at once", 0)
    stops: int = option(20, "runs in which a party is stopped for a while", 0)
    undisturbed: int = option(4, "undisturbed runs", 2)
    stopped_seconds: float = option(20.0, "seconds for which a party is stopped", 0.1)
    busy: int = option(20, "busy processes beside half of the runs", 0)
    out: str = option("runs/restarts.jsonl", "file of finished cells")


def run(config: Restarts) -> dict[str, Any]:
    """Run the missing cells, and compare."""
    out = Path(config.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    done = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    for cell in wanted(config):
        if not any(all(each[key] == cell[key] for key in cell) for each in done):
            done.append(measure(config, cell))
            with out.open("a") as file:
                file.write(json.dumps(done[-1]) + "\n")
    rows = compare(done)
    show("asynchronous parties", ("kind", "beside", "runs", "diverged", "hypers off", "params off, in spreads"), rows)
    return {"rows": rows, "cells": len(done), "machine": machine()}


def wanted(config: Restarts) -> list[Cell]:
    """Return all cells: of each kind half beside busy processes."""
    kinds = {"undisturbed": config.undisturbed, "restart": config.restarts, "stop": config.stops}
    return [
        {"kind": kind, "busy": config.busy if number % 2 and kind != "undisturbed" else 0, "number": number}
        for number in range(max(kinds.values()))
        for kind, count in kinds.items()
        if number < count
    ]


def party(name: str, base: str, ports: list[int]) -> None:
    """Run one party."""
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
    (folder / "found.json").write_text(json.dumps([each.tolist() for each in leaves]))


def measure(config: Restarts, cell: Cell) -> Cell:
    """Run four parties, one of which is disturbed."""
    random = np.random.default_rng([cell["number"], len(cell["kind"])])
    victim, at = str(random.choice(NAMES)), int(random.integers(5, 2 * STEPS))
    busy = [multiprocessing.Process(target=work, daemon=True) for _ in range(cell["busy"])]
    with tempfile.TemporaryDirectory() as folder:
        processes = Processes(Path(folder), party, (folder, free_ports(len(NAMES))))
        for each in busy:
            each.start()
        try:
            drive(processes, disturber(processes, cell["kind"], victim, config.stopped_seconds), victim, at)
        finally:
            processes.stop()
            for each in busy:
                each.terminate()
        if 1 in processes.ends.values():
            raise HyperpushError("a party failed without a disturbance; see above")
        found = {}
        for name in NAMES:
            path = Path(folder) / name / "found.json"
            found[name] = json.loads(path.read_text()) if path.exists() else None
        return {**cell, "victim": victim, "round": at, "ends": processes.ends, "found": found}


def disturber(processes: Processes, kind: str, victim: str, seconds: float) -> Callable[[], None]:
    """Return the function that disturbs the victim."""

    def restart() -> None:
        processes.kill(victim)
        processes.start(victim)

    def stop() -> None:
        pid = processes.running[victim].pid
        os.kill(pid, signal.SIGSTOP)
        time.sleep(seconds)
        os.kill(pid, signal.SIGCONT)

    return {"restart": restart, "stop": stop}.get(kind, lambda: None)


def drive(processes: Processes, disturb: Callable[[], None], victim: str, at: int, most: float = 1800.0) -> None:
    """Start all parties, disturb one at its round, and wait until all have ended."""
    for name in NAMES:
        processes.start(name)
    waiting, until = True, time.monotonic() + most
    while processes.running:
        if time.monotonic() > until:
            raise HyperpushError(f"not done after {most:g} s: {', '.join(processes.running)}")
        if waiting and victim in processes.running and processes.status(victim).get("round", 0) >= at:
            disturb()
            waiting = False
        time.sleep(0.02)
        processes.reap()


def work() -> None:
    """Keep a core busy."""
    while True:
        sum(range(10_000))


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
        rows.append((kind, f"{beside} busy", len(own), len(own) - len(whole), most(off), most(away)))
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
