"""Rounds per second and bytes per message of peers in step, beside older code in the same run.

    python benchmarks/peer_rates.py --revision 02a1685

Parties are threads of one process that communicate over loopback. Blocks of both codes take turns, each in a new
process, so that other work on the machine affects both alike. Seconds of CPU are compared, too: they hardly depend on
other work.
"""

import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from script import main, option, show
from timing import machine

from hyperpush.base.errors import HyperpushError

HERE = Path(__file__).parents[1] / "src"
ALLOWED = 0.05  # largest allowed loss of speed, as a share


@dataclass(frozen=True)
class Rates:
    """Peers of this code against peers of older code."""

    revision: str = option("", "git revision of the older code; left out: none")
    peers: tuple[int, ...] = option((4, 8, 16), "numbers of peers", 2)
    rounds: int = option(200, "rounds in a block", 2)
    blocks: int = option(3, "blocks of each code, of which the median is taken", 1)
    secure: bool = option(True, "use mutual TLS on links")


def run(config: Rates) -> dict[str, Any]:
    """Measure both codes in turns."""
    with tempfile.TemporaryDirectory() as folder:
        return compare(
            config, {"new": HERE, **({"old": checked_out(config.revision, folder)} if config.revision else {})}
        )


def checked_out(revision: str, folder: str) -> Path:
    """Write the sources of a revision to a folder, and return them."""
    archive = subprocess.run(["git", "archive", revision, "src"], cwd=HERE.parent, capture_output=True)
    if archive.returncode:
        raise HyperpushError(f"git has no sources of {revision}: {archive.stderr.decode()[-200:]}")
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
        files.extractall(folder, filter="data")
    return Path(folder) / "src"


def compare(config: Rates, codes: dict[str, Path]) -> dict[str, Any]:
    """Let blocks of all codes take turns, and compare their medians."""
    rows = []
    for peers in config.peers:
        found: dict[str, list[dict[str, float]]] = {name: [] for name in codes}
        for _ in range(config.blocks):
            for name, source in codes.items():
                found[name].append(_block(source, peers, config))
        middle = {
            name: {key: float(np.median([each[key] for each in blocks])) for key in blocks[0]}
            for name, blocks in found.items()
        }
        rows += [{"peers": peers, "code": name, **values} for name, values in middle.items()]
    columns = ("peers", "code", "rounds/s", "CPU ms per round and peer", "bytes per message")
    show("peers in step", columns, [tuple(row.values()) for row in rows])
    return {"rows": rows, "allowed": ALLOWED, "machine": machine()}


def _block(source: Path, peers: int, config: Rates) -> dict[str, float]:
    """Run one block in a separate process."""
    command = [sys.executable, __file__, "block", str(peers), str(config.rounds), str(int(config.secure))]
    environment = {**os.environ, "PYTHONPATH": f"{source}{os.pathsep}{Path(__file__).parent}"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise HyperpushError(f"a block of {source} failed: {done.stderr[-500:]}")
    return json.loads(done.stdout.splitlines()[-1])


def block(peers: int, rounds: int, secure: bool) -> None:
    """Let peers train for a number of rounds, and print the speed, CPU time and bytes."""
    import jax

    import hyperpush as hp
    from hyperpush.base.processes.starter import free_ports
    from hyperpush.deploy.certificates import make
    from hyperpush.engines.transport.zenoh.endpoints import Endpoints
    from hyperpush.tasks.logistic import logistic

    names = tuple(f"p{number}" for number in range(peers))
    sizes: list[int] = []
    put = Endpoints.put

    def counted(self: Any, to: int, channel: str, payload: bytes, attachment: bytes | None) -> bool:
        if channel == "data":
            sizes.append(len(payload) + len(attachment or b""))
        return put(self, to, channel, payload, attachment)

    Endpoints.put = counted  # type: ignore[method-assign]
    folder = Path(tempfile.mkdtemp())
    make(folder, names, ["127.0.0.1"])
    addresses = {name: f"127.0.0.1:{port}" for name, port in zip(names, free_ports(peers), strict=True)}
    task = logistic(peers, 0, log_rates=True).replace(names=names)
    begun: dict[int, tuple[float, float]] = {}
    ready = threading.Barrier(peers)

    def party(number: int) -> None:
        name = names[number]

        def progress(session: Any) -> None:
            session.on_begin = lambda: begun.setdefault(number, (time.perf_counter(), time.process_time()))

        options: dict[str, Any] = {"tls": secure, "patience": 300.0, "on_start": progress}
        # By position, because older code has other names for them.
        files: Any = [folder / each for each in ("ca.pem", f"{name}.pem", f"{name}.key")] if secure else [None] * 3
        engine = hp.Peers(name, addresses, *files, **options)
        method, network = hp.SGP(steps=rounds, step_size=0.5), hp.networks.FullyConnected(peers)
        ready.wait()
        hp.train(task.for_client(name), method, network, key=jax.random.key(0), engine=engine)

    threads = [threading.Thread(target=party, args=(number,)) for number in range(peers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    since = max(begun.values())
    seconds, work = time.perf_counter() - since[0], time.process_time() - since[1]
    print(json.dumps({"rate": rounds / seconds, "cpu": 1000 * work / rounds / peers, "bytes": float(np.mean(sizes))}))


if __name__ == "__main__":
    if sys.argv[1:2] == ["block"]:
        block(int(sys.argv[2]), int(sys.argv[3]), bool(int(sys.argv[4])))
    else:
        main(Rates, run)
