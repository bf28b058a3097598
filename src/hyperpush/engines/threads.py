"""Engine with one thread per client in a single process; clients exchange messages as bytes, as real peers do."""

import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import equinox as eqx
import jax
import numpy as np
from jaxtyping import PyTree

from hyperpush.engines import keys
from hyperpush.engines.base import Engine, Request
from hyperpush.engines.faults import Faults
from hyperpush.engines.peer.functions import row, stack
from hyperpush.engines.peer.peer import Peer
from hyperpush.engines.result import Progress, Record, RunResult
from hyperpush.engines.run_checks import check_clients
from hyperpush.engines.transport import MemoryTransport
from hyperpush.programs import Node, ProgramRecipe


class Threads(Engine):
    """Engine with one thread per client and a network in memory, to test the code path of real peers.

    Args:
        faults: Faults of the links. None: reliable links.
        deadline: Seconds, above 0, that a peer waits for a message before the run ends with an error.
    """

    faults: Faults | None = None
    deadline: float = eqx.field(static=True, default=60.0)

    def __check_init__(self):
        self.check_faults(self.faults)
        self.check_deadline(self.deadline)

    @property
    def no_tree(self) -> str:
        return "" if self.faults is None else "peers that lose messages"

    def execute(self, request: Request) -> RunResult:
        """Run the program of a request with one peer per client, each in a thread."""
        network, key = request.network, request.key
        hub = MemoryTransport(network.clients, self.faults, keys.faults_key(key), self.deadline)
        peers = [
            Peer(client, network, hub.endpoint(client), key, tolerant=self.faults is not None, step=request.step)
            for client in range(network.clients)
        ]
        states, data, recorders = request.states, request.data, request.recorders
        return run_peers(hub, peers, request.recipe, states, data, recorders, request.every, request.progress)


def run_peers(
    hub: MemoryTransport,
    peers: list[Peer],
    program: Node | ProgramRecipe,
    states: PyTree,
    data: PyTree,
    record: Mapping[str, Record] | None = None,
    every: int = 1,
    progress: Progress | None = None,
) -> RunResult:
    """Run each peer in a thread, with messages through `hub`, and return the combined result of all clients."""
    check_clients("states", states, len(peers))
    check_clients("data", data, len(peers))
    results: list[RunResult | None] = [None] * len(peers)
    failures: list[BaseException] = []
    wide = jax.config.read("jax_enable_x64")  # a thread does not inherit a setting that holds in a `with` block only

    def work(peer: Peer) -> None:
        try:
            with jax.enable_x64(wide):
                state, own = jax.tree.map(lambda leaf: row(leaf, peer.client), (states, data))
                shown = progress if peer.client == 0 else None
                results[peer.client] = peer.result(peer.run(program, state, own, record, every, shown))
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
    return _all_clients([result for result in results if result is not None])


def _all_clients(results: list[RunResult]) -> RunResult:
    """Combine the clients' results into one, with clients on axis 0 of states and axis 1 of records."""
    one = results[0]
    rows = {name: np.mean([each.clocks[name].floats for each in results], axis=0) for name in one.clocks}
    return replace(
        one,
        floats=round(sum(each.floats for each in results) / len(results)),  # along a tree, some send more than others
        clocks={name: replace(clock, floats=np.rint(rows[name]).astype(int)) for name, clock in one.clocks.items()},
        states=stack([each.states for each in results]),
        history={name: stack([each.history[name] for each in results], 1) for name in one.history},
        late=sum(each.late for each in results),
        rejected=dict(sum((Counter(each.rejected) for each in results), Counter())),
        bytes=np.concatenate([each.bytes for each in results]),
    )
