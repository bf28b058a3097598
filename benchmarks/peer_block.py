"""One block of `peer_rates.py`: peers of one process train for some rounds, and print their speed, CPU time and bytes.

    python benchmarks/peer_block.py PEERS ROUNDS SECURE

Besides the public face it imports only what older code has under the same name, so that both codes run it.
"""

import json
import socket
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

import hyperpush as hp
from hyperpush.deploy.certificates import make
from hyperpush.engines.transport.zenoh.endpoints import Endpoints
from hyperpush.engines.transport.zenoh.transport import Zenoh
from hyperpush.tasks.logistic import logistic

sizes: list[int] = []  # bytes of each part of a message, with its header
begun: list[tuple[float, float]] = []  # wall and CPU time at which each peer had heard all others
put, ready = Endpoints.put, Zenoh.ready


def counted(self: Any, to: int, channel: str, payload: bytes, attachment: bytes | None) -> bool:
    """Send, and note the size of a message of the program."""
    if channel == "data":
        sizes.append(len(payload) + len(attachment or b""))
    return put(self, to, channel, payload, attachment)


def timed(self: Any, *args: Any, **options: Any) -> None:
    """Wait for the others, and note the time."""
    ready(self, *args, **options)
    begun.append((time.perf_counter(), time.process_time()))


def free_ports(count: int) -> list[int]:
    """Return ports that are free now."""
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in held]
    for each in held:
        each.close()
    return ports


def main(peers: int, rounds: int, secure: bool) -> None:
    """Let peers train, one per thread."""
    Endpoints.put, Zenoh.ready = counted, timed  # type: ignore[method-assign]
    names = tuple(f"p{number}" for number in range(peers))
    folder = Path(tempfile.mkdtemp())
    make(folder, names, ["127.0.0.1"])
    addresses = {name: f"127.0.0.1:{port}" for name, port in zip(names, free_ports(peers), strict=True)}
    task, network = logistic(peers, 0, log_rates=True).replace(names=names), hp.networks.FullyConnected(peers)

    def party(name: str) -> None:
        files: Any = [folder / each for each in ("ca.pem", f"{name}.pem", f"{name}.key")] if secure else [None] * 3
        engine = hp.Peers(name, dict(addresses), *files, tls=secure, patience=300.0)
        method = hp.SGP(steps=rounds, step_size=0.5)
        hp.train(task.for_client(name), method, network, key=jax.random.key(0), engine=engine)

    threads = [threading.Thread(target=party, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wall, work = max(begun)
    seconds, cpu = time.perf_counter() - wall, time.process_time() - work
    print(json.dumps({"rate": rounds / seconds, "cpu": 1000 * cpu / rounds / peers, "bytes": float(np.mean(sizes))}))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), bool(int(sys.argv[3])))
