"""An engine that hosts one client of a run, in every party's process."""

from collections.abc import Mapping
from typing import Any, ClassVar, final

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PRNGKeyArray, PyTree

from hyperpush.engines.base import Engine
from hyperpush.engines.faults import Faults
from hyperpush.engines.peer import SERVER, Peer, Store, check_conserved
from hyperpush.engines.result import Progress, Record, RunResult
from hyperpush.engines.transport import Transport
from hyperpush.networks import Network
from hyperpush.programs import Average, Node, Recipe, Server, as_recipe, contains


def needs_server(program: Node) -> bool:
    """Whether somebody has to gather everybody's messages."""
    return contains(
        program, lambda node: isinstance(node, Server) or (isinstance(node, Average) and node.by == "exact")
    )


def neighbours(network: Network, client: int, everyone: bool = False) -> list[int]:
    """Whom a client ever talks to or hears; with `everyone`, which a server needs, also the server or all."""
    possible = network.possible()
    linked = np.asarray((possible + possible.T).todense())[client] > 0
    if everyone:
        linked = linked | (np.arange(network.clients) == SERVER) | (client == SERVER)
    linked[client] = False
    return np.flatnonzero(linked).tolist()


class PeerEngine(Engine):
    """Runs programs as `Simulate` does, but hosts one client: states, data and results are its own, without an axis."""

    hosts_one: ClassVar[bool] = True

    host: "Host" = eqx.field(static=True)

    @property
    def lossy(self) -> Faults | None:
        return Faults() if self.host.asynchronous else None

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
        return self.host.run(program, network, states, data, key, step, record, every, progress)


class Rehearsed(Exception):
    """A run got to its first program: all that is checked before has passed."""


class Rehearsal(Engine):
    """Takes the place of `PeerEngine` before anything is sent: verbs check what they are given, and nothing runs."""

    hosts_one: ClassVar[bool] = True

    asynchronous: bool = eqx.field(static=True)

    @property
    def lossy(self) -> Faults | None:
        return Faults() if self.asynchronous else None

    def run(self, program: Node | Recipe, *args: Any, **options: Any) -> RunResult:
        """Refuse what cannot run asynchronously, and end."""
        if self.asynchronous:
            check_conserved(as_recipe(program).program())
        raise Rehearsed


@final
class Host:
    """One client of a run: its transport, its checkpoints, and where it is."""

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
        program: Node | Recipe,
        network: Network,
        state: PyTree,
        data: PyTree,
        key: PRNGKeyArray,
        step: int,
        record: Mapping[str, Record] | None,
        every: int,
        progress: Progress | None,
    ) -> RunResult:
        """Walk a program as this client."""
        state, data = jax.tree.map(jnp.asarray, (state, data))
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

        state = peer.run(program, state, data, record, every, shown)
        history = {
            name: jax.tree.map(lambda *rows: jnp.stack(rows), *rows) for name, rows in peer.history.items() if rows
        }
        counts = peer.counts
        rejected = counts.rejections.counts()
        return counts.outcome(state, peer.step, history, peer.clocks, [counts.bytes], counts.late, rejected)

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
