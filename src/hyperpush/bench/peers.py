"""How fast peers exchange long messages, as a share of bare Zenoh moving the same bytes in the same run.

Two processes on loopback send each other one message per round and wait for the other's. Bare Zenoh puts the bytes and
hands them to Python. Peers encode a pytree, send it in parts, check and decode it. Blocks of both take turns, so that
whatever else the machine does meets both.
"""

import time
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from hyperpush.errors import HyperpushError
from hyperpush.runs.config import Config
from hyperpush.runs.experiment import Experiment

Count = Annotated[int, Field(ge=1)]
NAMES = ("left", "right")
ASKED = 0.7  # the share of bare Zenoh's rounds that peers are to reach, with messages of 9 MB and mutual TLS


class PeersBench(Config):
    """Options of the benchmark of peers."""

    megabytes: float = Field(default=9.0, gt=0, le=200, description="Size of a message, in 10⁶ bytes.")
    rounds: Count = Field(default=20, description="Rounds in a block.")
    blocks: Count = Field(default=7, description="Blocks of each kind, of which the median is taken.")
    secure: bool = Field(default=True, description="Whether both sides use mutual TLS.")


def run_peers(config: PeersBench, run: Any) -> dict[str, Any]:
    """Measure both and compare."""
    import json
    import tempfile

    import numpy as np

    from hyperpush.bench.timing import machine
    from hyperpush.deploy.certificates import make
    from hyperpush.deploy.swarm import Processes, free_ports

    where = machine()
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        if config.secure:
            make(base, NAMES, ["127.0.0.1"])
        processes = Processes(base, party, (config, str(base), free_ports(4)))
        try:
            for name in NAMES:
                processes.start(name)
            processes.watch(list(NAMES), [], 1800)
        finally:
            processes.stop()
        if any(processes.ends[name] for name in NAMES):
            raise HyperpushError("a peer of the benchmark failed; see above")
        seconds = json.loads((base / "left.json").read_text())
    rows, found = [], {}
    size = int(config.megabytes * 1e6)
    for kind, times in seconds.items():
        rate = config.rounds / float(np.median(times))
        # Each side sends and receives a message a round.
        found[kind] = {"rounds_per_second": rate, "megabytes_per_second": 2 * rate * size / 1e6}
        spread = [config.rounds / max(times), config.rounds / min(times)]
        rows.append((kind, rate, 2 * rate * size / 1e6, f"{spread[0]:.1f} to {spread[1]:.1f}"))
        for block, each in enumerate(times):
            run.record(kind=kind, block=block, seconds=each)
    ratios = np.asarray(seconds["bare Zenoh"]) / np.asarray(seconds["peers"])
    share = float(np.median(ratios))
    met = share >= ASKED
    judged = f"asked {ASKED:g}: {'met' if met else 'not met'}"
    rows.append(("share", share, None, f"{ratios.min():.2f} to {ratios.max():.2f}; {judged}"))
    how = "mutual TLS" if config.secure else "plain TCP"
    title = f"messages of {config.megabytes:g} MB, {how}"
    run.table(title, ("kind", "rounds/s", "MB/s, both ways", "blocks"), rows)
    rates = {key.replace(" ", "_").lower(): value for key, value in found.items()}
    return {**rates, "share": share, "asked": ASKED, "met": met, "machine": where}


def party(name: str, config: PeersBench, base: str, ports: list[int]) -> None:
    """One side of it."""
    import json

    from hyperpush.engines.transport.zenoh.session import Address, Identity

    folder, me = Path(base), NAMES.index(name)
    who = Identity(folder / "ca.pem", folder / f"{name}.pem", folder / f"{name}.key") if config.secure else None
    here, there = ([Address("127.0.0.1", ports[pair + side]) for pair in (0, 2)] for side in (me, 1 - me))
    bare, peers = _bare(name, config, here[0], there[0], who), _peers(name, config, here[1], there[1], who)
    seconds: dict[str, list[float]] = {"bare Zenoh": [], "peers": []}
    for side in (bare, peers):
        next(side)
    for _ in range(config.blocks + 1):  # the first block of each warms up
        for kind, block in (("bare Zenoh", bare), ("peers", peers)):
            seconds[kind].append(next(block))
    for side in (bare, peers):
        side.close()
    (folder / f"{name}.json").write_text(json.dumps({kind: times[1:] for kind, times in seconds.items()}))


def _dial(name: str, address: Any) -> Any:
    return address if name == NAMES[1] else None


def _bare(name: str, config: PeersBench, here: Any, there: Any, who: Any) -> Any:
    import queue

    import zenoh

    from hyperpush.engines.transport.zenoh import session

    other = NAMES[1 - NAMES.index(name)]
    made = session.settings("bare", name, here, {other: _dial(name, there)}, who)
    del made["transport"]["link"]["rx"]  # whole messages, as long as they are
    opened = session.open_session(made)
    got: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    key = session.message_key("bare", other, name, "data")
    heard = opened.declare_subscriber(key, lambda sample: got.put(sample.payload.to_bytes()))
    publisher = opened.declare_publisher(
        session.message_key("bare", name, other, "data"),
        congestion_control=zenoh.CongestionControl.BLOCK,
        reliability=zenoh.Reliability.RELIABLE,
    )
    while not publisher.matching_status.matching:
        time.sleep(0.01)
    payload = bytes(int(config.megabytes * 1e6))
    yield None
    while True:
        start = time.perf_counter()
        for _ in range(config.rounds):
            publisher.put(payload)
            if len(got.get(timeout=120)) != len(payload):
                raise HyperpushError("bare Zenoh lost bytes")
        try:
            yield time.perf_counter() - start
        except GeneratorExit:
            time.sleep(0.5)  # the other side may still be reading
            del heard
            opened.close()
            return


def _peers(name: str, config: PeersBench, here: Any, there: Any, who: Any) -> Any:
    import numpy as np

    from hyperpush.engines.transport.wire import Header, Template, decode, encode
    from hyperpush.engines.transport.zenoh.transport import Zenoh

    me = NAMES.index(name)
    transport = Zenoh("peers", NAMES, me, {NAMES[1 - me]: _dial(name, there)}, listen=here, identity=who)
    transport.ready()
    tree = {"params": np.random.default_rng(me).normal(size=int(config.megabytes * 1e6 / 4)).astype(np.float32)}
    template, step = Template(tree), 0
    yield None
    while True:
        start = time.perf_counter()
        for _ in range(config.rounds):
            transport.send(1 - me, step, encode(Header(0, 0, step, me), tree))
            ((sender, payload),) = transport.collect(step, [1 - me])
            decode(payload, template, expect_sender=sender)
            step += 1
        try:
            yield time.perf_counter() - start
        except GeneratorExit:
            transport.finish()
            transport.close()
            return


BENCH = Experiment("peers", "Long messages between two peers, against bare Zenoh.", PeersBench, run_peers)
