"""Peers for tests: threads of one process or separate processes, over Zenoh on loopback."""

import json
import sys
import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import hyperpush as hp
from hyperpush.base.processes.starter import free_ports
from hyperpush.deploy.certificates import make
from hyperpush.deploy.watch import STATUS, StatusFile
from hyperpush.engines.faults import Faults
from hyperpush.engines.peer import Peer
from hyperpush.engines.peer.checkpoint import Checkpoint
from hyperpush.engines.transport.faulty import Faulty
from hyperpush.engines.transport.zenoh.addresses import Address
from hyperpush.engines.transport.zenoh.identity import Identity
from hyperpush.engines.transport.zenoh.transport import Zenoh
from hyperpush.programs import Exchange, Repeat

DIGEST = bytes(range(32))


def certified(folder, names):
    make(folder, names, ["127.0.0.1"])
    return {name: identity(folder, name) for name in names}


def identity(folder, name, authority=None):
    return Identity((authority or folder) / "ca.pem", folder / f"{name}.pem", folder / f"{name}.key")


class Places:
    """The names and ports of the peers of one run."""

    def __init__(self, count, identities=None, run="test"):
        self.names = [f"p{number}" for number in range(count)]
        self.ports = free_ports(count)
        self.identities, self.run = identities or {}, run

    def address(self, client):
        return Address("127.0.0.1", self.ports[client])

    def open(self, client, **options):
        links = {
            name: self.address(other) if other < client else None
            for other, name in enumerate(self.names)
            if other != client
        }
        settings = {"digest": DIGEST, "patience": 120.0, **options}
        who = self.identities.get(self.names[client])
        return Zenoh(self.run, self.names, client, links, listen=self.address(client), identity=who, **settings)


def together(count, work) -> list[Any]:
    """Run `work(client)` for every client in a separate thread; return the results or raise the first failure."""
    results: list[Any] = [None] * count
    failures = []

    def guarded(client):
        try:
            results[client] = work(client)
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=guarded, args=(client,), daemon=True) for client in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    if failures:
        raise failures[0]
    assert not any(thread.is_alive() for thread in threads)
    return results


def values(clients, width=3):
    """Return the vector that each client contributes to an average."""
    return np.random.default_rng(5).normal(size=(clients, width))


def push_sum(rounds):
    """Return a push-sum program: w ← Pw and ω ← Pω, with the average w/ω."""
    return Repeat(
        Exchange(lambda state, ctx: state, lambda state, inbox, ctx: inbox.mix(state), conserved=True),
        rounds,
        name="average",
    )


def averaging(name, base, names, ports, rounds, options, faults=None):
    """Run one party of a push-sum average in a separate process, and write (w, ω) to its folder."""
    folder = Path(base) / name
    folder.mkdir(exist_ok=True)
    places = Places(0)
    places.names, places.ports = names, ports
    client = names.index(name)
    store = Checkpoint(folder / "checkpoint.safetensors", DIGEST)
    stored = store.load()
    out = {} if stored is None else {name: stored[name] for name in ("closed", "left")}
    transport = places.open(client, mode="asynchronous", durable=True, **out, **options)
    lossy = transport if faults is None else Faulty(transport, Faults(**faults), 1, client)
    with jax.enable_x64(True):
        network = hp.networks.RandomDirected(len(names), probability=(0.4, 0.8))
        peer = Peer(client, network, lossy, jax.random.key(3), tolerant=True, store=store)
        watcher = StatusFile(folder / STATUS, lambda: {"round": peer.counts.rounds, "links": transport.status()}, 0.02)
        watcher.start()
        try:
            transport.ready(everyone=stored is None)
            state = jnp.asarray(values(len(names))[client]), jnp.ones(())
            w, mass = peer.run(push_sum(rounds), state, None)
        except hp.HyperpushError as error:
            print(name, error, file=sys.stderr)
            sys.exit(2)
        finally:
            watcher.end()
            transport.close()
    found = {"w": np.asarray(w).tolist(), "mass": float(mass), "closed": sorted(peer.closed), "resumed": bool(stored)}
    (folder / "found.json").write_text(json.dumps(found))
