"""A run that is killed at random moments and resumed each time, compared with an undisturbed run.

    python killed.py FOLDER KILLS SEED

One process imports everything without starting JAX, and forks a process for each start of the run.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import jax
from jax._src import xla_bridge

import hyperpush as hp
from hyperpush.base.config import Config
from hyperpush.cli import app as cli
from hyperpush.runs.checkpoints import journal
from hyperpush.runs.experiment import Experiment
from hyperpush.spec import studies
from hyperpush.tasks.logistic import logistic

LOADED = (journal, hp.train, hp.SGP)  # imported here once, not in every process


class Pieces(Config):
    """Options of the run."""

    steps: int = 400
    pieces: int = 3


def length(params, hyper, batch):
    return jax.numpy.linalg.norm(params)


def run_trained(config: Pieces, run: Any) -> dict[str, Any]:
    """Train several times, each time from the last result; write a record and a set of models after each time."""
    task, network = logistic(5, 0, examples=10), hp.networks.RandomDirected(5)
    norms, rounds = [], 0
    solver = hp.SGP(config.steps, 0.1, batch_size=4)
    for piece in range(config.pieces):
        found = hp.train(task, solver, network, key=piece, metrics={"length": length}, every=10)
        task, rounds = found.task, rounds + found.costs.rounds
        norms.append(float(jax.numpy.linalg.norm(task.params)))
        assert found.history is not None
        run.record(piece=piece, norm=norms[-1], lengths=found.history.metrics["length"][:, 0])
    run.save_models("params", task.params)
    return {"norms": norms, "rounds": rounds}


studies.experiments = lambda: {"trained": Experiment("trained", "", Pieces, run_trained)}


def started(folder: Path, *arguments: str) -> int:
    """Start a command in a new process and return its process id."""
    assert not xla_bridge.backends_are_initialized()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        with (folder / "stderr").open("a") as file:
            os.dup2(file.fileno(), 2)
        os.chdir(folder)
        cli.main([*arguments, "--checkpoint-rounds", "40"])
    except SystemExit as end:
        code = int(end.code or 0)
    finally:
        os._exit(code)


def ended(pid: int) -> int | None:
    """Return the exit code of a process, or None while it runs."""
    found, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if found else None


def newest(folder: Path) -> str:
    names = [each.name for each in (folder / ".killed.partial" / "checkpoints").glob("[0-9]*")]
    return max(names, default="")


def main(folder: Path, kills: int, seed: int) -> None:
    chance = random.Random(seed)
    arguments = ["trained", "-s", f"pieces={max(8, kills)}"]  # enough pieces to outlast all kills on a fast machine
    alone = started(folder, "run", *arguments, "--out", "alone")
    os.waitpid(alone, 0)
    done, pid, code = 0, started(folder, "run", *arguments, "--out", "killed"), None
    while done < kills:
        # Wait for some progress, then for a random time: the process may be computing, writing, or in the next piece.
        before = newest(folder)
        while (code := ended(pid)) is None and newest(folder) == before:
            time.sleep(0.002)
        time.sleep(chance.uniform(0, 0.4))
        code = ended(pid) if code is None else code
        if code is not None:
            break
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        done += 1
        pid = started(folder, "resume", "killed")
    if code is None:
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    print(json.dumps({"kills": done, "exit_code": code}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
