"""Speed of long messages between peers, as a share of bare Zenoh moving the same bytes in the same run.

Two processes on loopback send each other one message per round and wait for the other's. Bare Zenoh puts the bytes and
hands them to Python. Peers encode a pytree, send it in parts, check and decode it. Blocks of both take turns, so that
other work on the machine affects both alike.
"""

import json
import queue
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from script import main, option, show
from timing import machine

from hyperpush.base.checks import require
from hyperpush.base.errors import HyperpushError, InvalidInput
from hyperpush.base.processes.starter import free_ports
from hyperpush.deploy.certificates import make
from hyperpush.deploy.swarm import Processes
from hyperpush.engines.transport.wire import Header, Template, decode, encode
from hyperpush.engines.transport.zenoh import session
from hyperpush.engines.transport.zenoh.addresses import Address
from hyperpush.engines.transport.zenoh.identity import Identity
from hyperpush.engines.transport.zenoh.transport import Zenoh

zenoh = require("zenoh", "peers")

Side = tuple[Callable[[], None], Callable[[], None]]
NAMES = ("left", "right")
MOST = 200  # largest size of a message in megabytes
ASKED = 0.7  # required share of bare Zenoh's speed, with messages of 9 MB and mutual TLS


@dataclass(frozen=True)
class Peers:
    """Long messages between two peers, against bare Zenoh."""

    megabytes: float = option(9.0, "size of a message, in 10⁶ bytes, at most 200", 1e-6)
    rounds: int = option(20, "rounds in a block", 1)
    blocks: int = option(7, "blocks of each kind, of which the median is taken", 1)
    secure: bool = option(True, "use mutual TLS on both sides")


def run(config: Peers) -> dict[str, Any]:
    """Measure both and compare."""
    if config.megabytes > MOST:
        raise InvalidInput("megabytes", config.megabytes, f"at most {MOST}")
    where, seconds = machine(), _measure(config)
    rows, found = [], {}
    for kind, times in seconds.items():
        rate = config.rounds / float(np.median(times))
        both_ways = 2 * rate * int(config.megabytes * 1e6) / 1e6
        found[kind.replace(" ", "_").lower()] = {"rounds_per_second": rate, "megabytes_per_second": both_ways}
        rows.append((kind, rate, both_ways, f"{config.rounds / max(times):.1f} to {config.rounds / min(times):.1f}"))
    ratios = np.asarray(seconds["bare Zenoh"]) / np.asarray(seconds["peers"])
    share = float(np.median(ratios))
    met = share >= ASKED
    judged = f"asked {ASKED:g}: {'met' if met else 'not met'}"
    rows.append(("share", share, None, f"{ratios.min():.2f} to {ratios.max():.2f}; {judged}"))
    title = f"messages of {config.megabytes:g} MB, {'mutual TLS' if config.secure else 'plain TCP'}"
    show(title, ("kind", "rounds/s", "MB/s, both ways", "blocks"), rows)
    return {**found, "share": share, "asked": ASKED, "met": met, "seconds": seconds, "machine": where}


def _measure(config: Peers) -> dict[str, list[float]]:
    """Return the seconds of each block of each kind."""
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        if config.secure:
            make(base, NAMES, ["127.0.0.1"])
        processes = Processes(base, party, (config, str(base), free_ports(4)))
        processes.run(list(NAMES), [], 1800)
        if any(processes.ends[name] for name in NAMES):
            raise HyperpushError("a peer of the benchmark failed; see above")
        return json.loads((base / f"{NAMES[0]}.json").read_text())


def party(name: str, config: Peers, base: str, ports: list[int]) -> None:
    """Run one side of the benchmark."""
    folder, me = Path(base), NAMES.index(name)
    who = Identity(folder / "ca.pem", folder / f"{name}.pem", folder / f"{name}.key") if config.secure else None
    here, there = ([Address("127.0.0.1", ports[pair + side]) for pair in (0, 2)] for side in (me, 1 - me))
    dialed = there if me else [None, None]  # the second one dials
    size = int(config.megabytes * 1e6)
    sides = {"bare Zenoh": _bare(me, size, here[0], dialed[0], who), "peers": _peers(me, size, here[1], dialed[1], who)}
    seconds: dict[str, list[float]] = {kind: [] for kind in sides}
    for _ in range(config.blocks + 1):  # the first block of each warms up
        for kind, (exchange, _) in sides.items():
            start = time.perf_counter()
            for _ in range(config.rounds):
                exchange()
            seconds[kind].append(time.perf_counter() - start)
    for _, close in sides.values():
        close()
    (folder / f"{name}.json").write_text(json.dumps({kind: times[1:] for kind, times in seconds.items()}))


def _bare(me: int, size: int, here: Address, dialed: Address | None, who: Identity | None) -> Side:
    """Return functions for a round of bare Zenoh and for its end."""
    name, other = NAMES[me], NAMES[1 - me]
    made = session.settings("bare", name, here, {other: dialed}, who)
    del made["transport"]["link"]["rx"]  # whole messages of any length
    opened, got, payload = session.open_session(made), queue.SimpleQueue[bytes](), bytes(size)
    key = session.message_key("bare", other, name, "data")
    heard = [opened.declare_subscriber(key, lambda sample: got.put(sample.payload.to_bytes()))]
    publisher = opened.declare_publisher(
        session.message_key("bare", name, other, "data"),
        congestion_control=zenoh.CongestionControl.BLOCK,
        reliability=zenoh.Reliability.RELIABLE,
    )
    while not publisher.matching_status.matching:
        time.sleep(0.01)

    def exchange() -> None:
        publisher.put(payload)
        if len(got.get(timeout=120)) != size:
            raise HyperpushError("bare Zenoh lost bytes")

    def close() -> None:
        time.sleep(0.5)  # the other side may still be reading
        heard.clear()
        opened.close()

    return exchange, close


def _peers(me: int, size: int, here: Address, dialed: Address | None, who: Identity | None) -> Side:
    """Return functions for a round of peers and for their end."""
    transport = Zenoh("peers", NAMES, me, {NAMES[1 - me]: dialed}, listen=here, identity=who)
    transport.ready()
    tree = {"params": np.random.default_rng(me).normal(size=size // 4).astype(np.float32)}
    template, steps = Template(tree), count()

    def exchange() -> None:
        step = next(steps)
        transport.send(1 - me, step, encode(Header(0, 0, step, me), tree))
        ((sender, payload),) = transport.collect(step, [1 - me])
        decode(payload, template, expect_sender=sender)

    def close() -> None:
        transport.finish()
        transport.close()

    return exchange, close


if __name__ == "__main__":
    main(Peers, run)
