"""All clients of a run as peers in one process, a thread for each, exchanging bytes."""

import threading
from collections import Counter
from collections.abc import Mapping

import equinox as eqx
import jax
from jaxtyping import PRNGKeyArray, PyTree

from hyperpush.engines import keys
from hyperpush.engines.base import Engine
from hyperpush.engines.checks import check_clients
from hyperpush.engines.faults import Faults
from hyperpush.engines.peer.leaves import row, stacked
from hyperpush.engines.peer.walk import Peer
from hyperpush.engines.result import Progress, Record, RunResult
from hyperpush.engines.transport import Memory
from hyperpush.networks import Network
from hyperpush.programs import Node, Recipe


class Threads(Engine):
    """Every client as a peer in a thread of its own, on a network in memory: what real peers do, without a network.

    Args:
        faults: What the links do to messages. None: nothing is lost, repeated or late.
        deadline: Seconds that a peer waits for a message before the run ends with an error.
    """

    faults: Faults | None = None
    deadline: float = eqx.field(static=True, default=60.0)

    def __check_init__(self):
        self.check_faults(self.faults)
        self.check_deadline(self.deadline)

    def run(
        self,
        program: Node | Recipe,
        network: Network,
        states: PyTree,
        data: PyTree,
        key: PRNGKeyArray,
        *,
        step: int = 0,
        record: Mapping[str, Record] | None = None,
        every: int = 1,
        progress: Progress | None = None,
    ) -> RunResult:
        """See `Engine.run`."""
        hub = Memory(network.clients, self.faults, keys.faults_key(key), self.deadline)
        tolerant = self.faults is not None
        return run_peers(hub, tolerant, program, network, states, data, key, step, record or {}, every, progress)


def run_peers(
    hub: Memory,
    tolerant: bool,
    program: Node | Recipe,
    network: Network,
    states: PyTree,
    data: PyTree,
    key: PRNGKeyArray,
    step: int = 0,
    record: Mapping[str, Record] | None = None,
    every: int = 1,
    progress: Progress | None = None,
) -> RunResult:
    """Peers that talk through `hub`; `tolerant` of messages that get lost."""
    check_clients("states", states, network.clients)
    check_clients("data", data, network.clients)
    peers = [
        Peer(client, network, hub.endpoint(client), key, tolerant=tolerant, step=step)
        for client in range(network.clients)
    ]
    results: list[PyTree] = [None] * network.clients
    failures: list[BaseException] = []
    wide = jax.config.read("jax_enable_x64")  # a thread does not inherit what was switched on for a block only

    def work(peer: Peer) -> None:
        try:
            with jax.enable_x64(wide):
                own_state, own_data = (
                    jax.tree.map(lambda leaf: row(leaf, peer.client), tree) for tree in (states, data)
                )
                shown = progress if peer.client == 0 else None
                results[peer.client] = peer.run(program, own_state, own_data, record, every, shown)
        except BaseException as failure:
            failures.append(failure)
            hub.abort(failure)

    threads = [threading.Thread(target=work, args=(peer,), daemon=True) for peer in peers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]

    def stack(trees: list[PyTree], axis: int = 0) -> PyTree:
        return jax.tree.map(lambda *leaves: stacked(leaves, axis), *trees)

    history = {
        name: stack([stack(peer.history[name]) for peer in peers], 1) for name in record or {} if peers[0].history[name]
    }
    rejected = Counter()
    for peer in peers:
        rejected.update(peer.counts.rejections.counts())
    late = sum(peer.counts.late for peer in peers)
    sent = [peer.counts.bytes for peer in peers]
    one = peers[0]
    return one.counts.outcome(stack(results), one.step, history, one.clocks, sent, late, dict(rejected))
