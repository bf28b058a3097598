"""Try out many parties on this machine: as processes on loopback, with seeded faults and a table of their progress."""

import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any, final

import numpy as np

from hyperpush.base.errors import Absent, Diverged, HyperpushError, InUse, InvalidInput, Refused
from hyperpush.base.processes.starter import free_ports
from hyperpush.base.status import Status, is_growing
from hyperpush.deploy.certificates import make
from hyperpush.deploy.options import Deployment, Party
from hyperpush.deploy.party import prepare, run_peer
from hyperpush.deploy.watch import STATUS
from hyperpush.engines.transport.zenoh.addresses import NAME
from hyperpush.runs.events import read_events
from hyperpush.runs.folder import RESULT, is_new, make_folder
from hyperpush.runs.process import set_up_jax
from hyperpush.spec import objects
from hyperpush.task.task import Task

Show = Callable[[Mapping[str, dict[str, Any]]], None]  # function that is called with every party's status, by name
PRELOADED = ["hyperpush.verbs.solve", "hyperpush.engines.peers", "hyperpush.engines.transport.zenoh.transport"]

# Exit codes of parties from best to worst. A cause is worse than its consequence: if one party fails, the others end
# because that party is absent.
WORSE = (0, Absent.exit_code, Diverged.exit_code, Refused.exit_code, InUse.exit_code, HyperpushError.exit_code)


class PartiesFailed(HyperpushError):
    """Raised when parties of a swarm end without a result. Its exit code is the worst of theirs."""

    def __init__(self, message: str, exit_code: int):
        self._exit_code = exit_code
        super().__init__(message)

    @property
    def exit_code(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._exit_code


@dataclass(frozen=True)
class Kill:
    """A planned SIGKILL of a peer when it reaches a round, with an optional restart."""

    name: str
    round: int
    again_after: float | None = None  # seconds until the restart; None: no restart


@final
@dataclass
class Processes:
    """The processes of a swarm, one per party. Each runs `target(name, *arguments)`, with its folder under `base`.

    All are forked from a process that has already imported JAX, and share nothing else.
    """

    base: Path
    target: Callable[..., Any]
    arguments: tuple[Any, ...] = ()
    running: dict[str, Any] = field(default_factory=dict)
    ends: dict[str, int] = field(default_factory=dict)  # exit codes by name; −9 for a killed process

    def start(self, name: str) -> None:
        """Start a party, or restart one that has ended."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        process = context.Process(target=self.target, args=(name, *self.arguments), name=name, daemon=True)
        process.start()
        self.running[name] = process
        self.ends.pop(name, None)

    def reap(self) -> None:
        """Note the exit codes of processes that have ended."""
        for name, process in list(self.running.items()):
            if process.exitcode is not None:
                self.ends[name] = process.exitcode
                del self.running[name]

    def kill(self, name: str) -> None:
        """Kill a party with SIGKILL, to simulate a power cut."""
        if name in self.running:
            self.running[name].kill()
            self.running[name].join(10)
            self.reap()

    def stop(self) -> None:
        """Kill all processes that still run."""
        for name in list(self.running):
            self.kill(name)

    def status(self, name: str) -> dict[str, Any]:
        """Return the last event in a party's status file; empty if it has written none."""
        try:
            return read_events(self.base / name / STATUS)[-1]
        except (OSError, IndexError):
            return {}

    def run(self, names: list[str], kills: list[Kill], seconds: float, show: Show | None = None) -> None:
        """Start all parties, kill and restart some of them, and wait until all have ended, for at most `seconds`."""
        until, again = time.monotonic() + seconds, list[tuple[float, str]]()
        try:
            for name in names:
                self.start(name)
            while self.running or again:
                if time.monotonic() > until:
                    left = ", ".join(sorted(self.running))
                    raise HyperpushError(f"not done after {seconds:g} s: {left}; they were ended")
                if kills or show is not None:
                    seen = {name: self.status(name) for name in names}
                    due = [kill for kill in kills if seen[kill.name].get("round", 0) >= kill.round]
                    kills = [kill for kill in kills if kill not in due]
                    again += self._kill_all(due)
                    if show is not None:
                        show(seen)
                for name in [name for when, name in again if when <= time.monotonic()]:
                    self.start(name)
                again = [(when, name) for when, name in again if name not in self.running]
                time.sleep(0.05)
                self.reap()
        finally:
            self.stop()

    def _kill_all(self, kills: list[Kill]) -> list[tuple[float, str]]:
        """Kill parties that are still running. Return the time and name of each restart."""
        again = []
        for kill in [kill for kill in kills if kill.name in self.running]:
            self.kill(kill.name)
            if kill.again_after is not None:
                again.append((time.monotonic() + kill.again_after, kill.name))
        return again


def peer_names(task: Task) -> list[str]:
    """Return the names of a task's clients if they are valid for peers, else (as for numbers) `peer-0`, `peer-1`, …."""
    fit = all(NAME.fullmatch(name) and not name.isdecimal() for name in task.names)
    return list(task.names) if fit else [f"peer-{number}" for number in range(task.clients)]


def on_loopback(config: Deployment, names: list[str], base: Path, secure: bool = True) -> Deployment:
    """Return the configuration for peers on loopback, with a port and a certificate for each."""
    if config.peers:
        raise InvalidInput("peers", list(config.peers), "none: a swarm makes its own")
    ports = free_ports(len(names))
    certificates = base / "certificates"
    if secure:
        make(certificates, names, ["127.0.0.1"])
    peers = {
        name: Party(
            address=f"127.0.0.1:{port}",
            certificate=str(certificates / f"{name}.pem") if secure else None,
            private_key=str(certificates / f"{name}.key") if secure else None,
            out=str(base / name),
        )
        for name, port in zip(names, ports, strict=True)
    }
    authority = str(certificates / "ca.pem") if secure else None
    return replace(config.with_engine(authority=authority), peers=peers)


def run_one(name: str, config: Deployment) -> None:
    """Run one party in the current process, without a rehearsal. If it fails, exit with the error's exit code."""
    try:
        result = run_peer(config, name, say=lambda line: print(line, file=sys.stderr, flush=True), rehearsed=True)
    except HyperpushError as error:
        print(f"error: {name}:", " ".join(str(error).split()), file=sys.stderr, flush=True)
        sys.exit(error.exit_code)
    if is_growing(result):
        sys.exit(Diverged.exit_code)


def worst(codes: Iterable[int | None]) -> int:
    """Return the worst exit code of several parties. Worst are those of bugs (1) and signals (128 + number)."""
    found = [1 if code is None else 128 - code if code < 0 else code for code in codes]
    return max(found, key=lambda code: (code not in WORSE, WORSE.index(code) if code in WORSE else code), default=0)


def schedule(names: list[str], kill: int, restart: int, rounds: int, seed: int, pause: float = 0.5) -> list[Kill]:
    """Schedule kills of `kill` different peers at random rounds below `rounds`; the first `restart` of them restart."""
    random = np.random.default_rng([seed, 7])
    victims = random.permutation(names)[:kill].tolist()
    when = random.integers(1, max(rounds, 2), kill).tolist()
    return [
        Kill(str(name), int(at), pause if number < restart else None)
        for number, (name, at) in enumerate(zip(victims, when, strict=True))
    ]


def swarm(
    config: Deployment,
    count: int,
    base: Path,
    *,
    secure: bool = True,
    kill: int = 0,
    restart: int = 0,
    kill_before: int = 100,
    seconds: float = 3600.0,
    show: Show | None = None,
) -> dict[str, Any]:
    """Run `count` parties to their end, and kill `kill` of them, of which `restart` are started again.

    Return the result and the exit code of each party, and the worst exit code.
    """
    if count < 2:
        raise InvalidInput("-n", count, "2 or more")
    if not 0 <= restart <= kill < count:
        raise InvalidInput("--kill, --restart", (kill, restart), f"0 ≤ restart ≤ kill < {count}")
    if kill and not config.engine["checkpoint_every"] and restart:
        raise InvalidInput("deploy.checkpoint_every", 0, "1 or more, to restart peers")
    if not is_new(base, "--out"):
        raise InvalidInput("--out", str(base), "a new or empty folder")
    base = base.resolve()
    with set_up_jax(config.spec.precision):
        spec = objects.read(config.spec.tables())
        if spec.task.clients != count:
            raise InvalidInput("-n", count, f"{spec.task.clients}, the clients of the task")
        names = peer_names(spec.task)
        plain = on_loopback(config, names, base, secure=False)
        for name in names:
            prepare(plain, name, Path(), spec)
    make_folder(base, "--out")
    made = on_loopback(config, names, base, secure)
    os.environ.setdefault("PYTHONWARNINGS", "ignore::RuntimeWarning")  # JAX warns of forks, but here it starts later
    kills = schedule(names, kill, restart, kill_before, config.engine["fault_seed"])
    processes = Processes(base, run_one, (made,))
    processes.run(names, kills, seconds, show)
    results = {}
    for name in names:
        path = base / name / RESULT
        results[name] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
    killed = {kill.name for kill in kills if kill.again_after is None}
    codes = {name: processes.ends.get(name) for name in names}
    ended = worst(code for name, code in codes.items() if name not in killed)
    missing = [name for name in names if results[name] is None and name not in killed]
    if missing:
        raise PartiesFailed(f"ended without a result: {', '.join(missing)}; their files are in {base}", ended)
    return {"peers": results, "exit_codes": codes, "exit_code": ended, "out": str(base)}


def doubts(result: Mapping[str, Any]) -> list[str]:
    """Return a line for each peer whose result did not converge."""
    statuses = {name: Status(**own["status"]) for name, own in result["peers"].items() if own and "status" in own}
    return [f"{name}: {status}" for name, status in statuses.items() if status.converged is False]


def default_folder(out: Path | None) -> Path:
    """Return the folder of a swarm's files: `out`, by default a new folder under `runs/`."""
    return out or Path("runs", f"swarm-{datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}")


def rows(seen: Mapping[str, dict[str, Any]]) -> list[tuple[Any, ...]]:
    """Return one table row per peer, in the order of `COLUMNS`.

    "seen" is the time since any other peer last got a message from the peer. "lag" is the number of rounds by which it
    is behind the foremost peer.
    """
    foremost = max((each.get("round", 0) for each in seen.values()), default=0)
    lines = []
    for name, own in seen.items():
        ages = [other["links"][name]["last_seen"] for other in seen.values() if name in other.get("links", {})]
        ages = [age for age in ages if age is not None]
        alive = any(other["links"][name]["alive"] for other in seen.values() if name in other.get("links", {}))
        rejected = sum(own.get("rejected", {}).values()) + sum(own.get("rejected_by_transport", {}).values())
        lines.append(
            (
                name,
                "never" if not ages else f"{min(ages):.1f} s" if alive else "gone",
                own.get("round", 0),
                foremost - own.get("round", 0),
                f"{own['loop']} {own['step']}/{own['total']}" if "loop" in own else "",
                round(own.get("sent_bytes", 0) / 1000),
                round(own.get("received_bytes", 0) / 1000),
                own.get("late", 0),
                rejected,
            )
        )
    return lines


COLUMNS = ("peer", "seen", "round", "lag", "loop", "kB out", "kB in", "late", "refused")
