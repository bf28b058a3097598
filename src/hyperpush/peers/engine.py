"""An engine that hosts one client of a run: `hp.solve(…, run=Engine(…).run)` in every party's process."""

from collections.abc import Mapping
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PRNGKeyArray, PyTree

from hyperpush.engine.faults import Faults
from hyperpush.engine.outcome import Outcome, Progress, Record
from hyperpush.engine.peer import SERVER, Peer, Store, check_conserved, row
from hyperpush.engine.transport import Transport
from hyperpush.networks import Network
from hyperpush.program import Node


def neighbours(network: Network, client: int, everyone: bool = False) -> list[int]:
    """Whom a client ever talks to or hears; with `everyone`, which a server needs, also the server or all."""
    possible = network.possible()
    linked = np.asarray((possible + possible.T).todense())[client] > 0
    if everyone:
        linked = linked | (np.arange(network.clients) == SERVER) | (client == SERVER)
    linked[client] = False
    return np.flatnonzero(linked).tolist()


@final
class Engine:
    """Runs programs as `simulate.run` does, but hosts one client; every stacked result has that one row."""

    def __init__(
        self,
        client: int,
        transport: Transport,
        asynchronous: bool = False,
        store: Store | None = None,
        store_every: int = 1,
        secret: PRNGKeyArray | None = None,
        repeats: bool = True,
    ):
        self.client, self.transport, self.asynchronous = client, transport, asynchronous
        self.store, self.store_every, self.secret, self.repeats = store, store_every, secret, repeats
        self._peer: Peer | None = None
        self.leaves = False  # whether it was asked to
        self._loop = ""

    def run(
        self,
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
    ) -> Outcome:
        """As `simulate.run`; of `states` and `data` only this client's row is used."""
        if self.asynchronous:
            check_conserved(program)
        state, own = (jax.tree.map(lambda leaf: row(leaf, self.client), tree) for tree in (states, data))
        peer = self._peer = Peer(
            self.client,
            network,
            self.transport,
            key,
            tolerant=self.asynchronous,
            step=step,
            store=self.store,
            store_every=self.store_every,
            secret=self.secret,
            repeats=self.repeats,
        )
        if self.leaves:
            peer.leave()

        def shown(name: str, done: int, total: int) -> None:
            self._loop = f"{name} {done}/{total}"
            if progress is not None:
                progress(name, done, total)

        state = peer.run(program, state, own, record, every, shown)
        history = {
            name: jax.tree.map(lambda *rows: jnp.stack(rows)[:, None], *rows)
            for name, rows in peer.history.items()
            if rows
        }
        states = jax.tree.map(lambda leaf: leaf[None], state)
        return peer.counts.outcome(states, peer.step, history, peer.counts.late, peer.counts.rejections.counts())

    def leave(self) -> None:
        """Leave the run for good, as soon as its program allows it."""
        self.leaves = True
        if self._peer is not None:
            self._peer.leave()

    def status(self) -> dict[str, Any]:
        """Where the client is."""
        peer = self._peer
        if peer is None:
            return {"round": 0, "loop": "", "late": 0, "rejected": {}}
        return {
            "round": peer.counts.rounds,
            "loop": self._loop,
            "late": peer.counts.late,
            "rejected": peer.counts.rejections.counts(),
        }
