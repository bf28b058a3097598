"""All clients of a run as peers in one process, a thread for each: the engine `peer`."""

import threading
from collections import Counter
from collections.abc import Mapping

import jax
from jaxtyping import PRNGKeyArray, PyTree

from hyperpush.engine import keys
from hyperpush.engine.faults import Faults
from hyperpush.engine.layout import check_clients, check_repairable
from hyperpush.engine.outcome import Outcome, Progress, Record
from hyperpush.engine.peer.leaves import row, stacked
from hyperpush.engine.peer.walk import Peer
from hyperpush.engine.transport import Memory
from hyperpush.networks import Network
from hyperpush.program import Node, stepwise


def run(
    program: Node,
    network: Network,
    states: PyTree,
    data: PyTree,
    key: PRNGKeyArray,
    *,
    step: int = 0,
    record: Mapping[str, Record] | None = None,
    every: int = 1,
    faults: Faults | None = None,
    progress: Progress | None = None,
    deadline: float = 60.0,
    hub: Memory | None = None,
) -> Outcome:
    """Every client as a peer in a thread of its own, on a network in memory; as `simulate.run`."""
    check_clients("states", states, network.clients)
    check_clients("data", data, network.clients)
    check_repairable(program, faults is not None)
    program = stepwise(program)  # once, so that the leaves that this makes are compiled once
    hub = hub or Memory(network.clients, faults, keys.faults_key(key), deadline)
    peers = [
        Peer(client, network, hub.endpoint(client), key, tolerant=faults is not None, step=step)
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
    return peers[0].counts.outcome(stack(results), peers[0].step, history, late, dict(rejected))
