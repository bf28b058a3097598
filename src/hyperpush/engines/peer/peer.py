"""A peer: one client of a run, which walks the program node by node and exchanges messages."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import NoReturn, final

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PRNGKeyArray, PyTree

from hyperpush.base.errors import HyperpushError, InvalidInput
from hyperpush.engines.peer.channels import Channel
from hyperpush.engines.peer.durable import PeerStore, SavedPeer, as_tree, pack
from hyperpush.engines.peer.ending import await_missing, drain, transfer_mass
from hyperpush.engines.peer.exchanges import Received, ask_server, exchange_messages, exchange_totals
from hyperpush.engines.peer.functions import ClientFunctions, ClientLinks, compute_key, in_turn, links_at, stack, turns
from hyperpush.engines.peer.members import Members, NewView, members_of
from hyperpush.engines.peer.messenger import Messenger
from hyperpush.engines.peer.state import Frame, PeerCounts, PeerCursor, PeerState, Stage
from hyperpush.engines.peer.trees import TreeAverages
from hyperpush.engines.result import Progress, Record, RunResult, record_shapes, recorders_of
from hyperpush.engines.run_checks import check_recording, check_repairable
from hyperpush.engines.transport import Transport
from hyperpush.networks import Network, Weights
from hyperpush.programs import stepwise
from hyperpush.programs.nodes import (
    Average,
    Exchange,
    Inbox,
    Local,
    Node,
    Path,
    Repeat,
    Role,
    Scope,
    Sequence,
    Server,
    with_answer,
)
from hyperpush.programs.profile import profile
from hyperpush.programs.recipe import ProgramRecipe, as_recipe
from hyperpush.programs.recipe import at as node_at

LATE = (1 << 31) - 1  # iteration number in random keys for receiving late mass; no loop reaches it


@final
class Peer:
    """One client of a run, with its own connection to the other clients.

    Args:
        client: Number of the client, from 0.
        network: The links between clients at every step.
        transport: Connection to the other peers.
        key: Key of all draws that are not secret, the same at all peers.
        tolerant: True if links may lose messages, so that conserved quantities are sent as running sums. The same at
            all peers.
        step: Network time at the start.
        store: Storage from which the peer continues after it was killed. None: the peer cannot continue.
        store_every: Number of exchanges between two saves, 1 or more. Exchanges of running sums are always saved.
        secret: The key of this peer's secret draws, such as noise for privacy. None: its draws follow from `key`, which
            all peers know. A restarted peer must have the same secret. After a change of the membership it draws other
            numbers.
        repeats: True lets the peer restart averages after a change of the membership. False ends it with an error,
            because ε covers each release only once.
    """

    def __init__(
        self,
        client: int,
        network: Network,
        transport: Transport,
        key: PRNGKeyArray,
        *,
        tolerant: bool = False,
        step: int = 0,
        store: PeerStore | None = None,
        store_every: int = 1,
        secret: PRNGKeyArray | None = None,
        repeats: bool = True,
    ):
        self.client, self.network, self.transport, self.key = client, network, transport, key
        self.tolerant, self.store, self.store_every = tolerant, store, store_every
        self._secret, self._repeats = secret, repeats
        self._state = PeerState(step)
        self.members: Members | None = members_of(transport)
        self._messenger = Messenger(client, transport, tolerant, self._state, network.clients)
        self._channels = self._messenger.channels
        self._ahead: list[Frame] = []  # stored frames of nodes that it has not entered again yet, outermost first
        self._resumed: SavedPeer | None = None
        self._asked_to_leave = False
        self._run: dict[type, Callable[..., PyTree]] = {
            Local: lambda node, state, at: self._apply(at, Role.LOCAL, state),
            Sequence: self._run_sequence,
            Scope: self._run_scope,
            Repeat: self._run_repeat,
            Exchange: self._run_exchange,
            Server: self._run_server,
            Average: self._run_average,
        }

    @property
    def step(self) -> int:
        """Network time of the next exchange."""
        return self._state.step

    @property
    def closed(self) -> frozenset[int]:
        """Members that were removed."""
        return self._state.closed

    @property
    def mass(self) -> float | None:
        """Mass that this peer holds in the current average; None outside of averages."""
        channels = list(self._channels.numbered.values())  # a copy, because another thread may ask
        found = [channel.mass for channel in channels if channel.tolerant]
        return float(found[-1]) if found else None

    @property
    def counts(self) -> PeerCounts:
        """Rounds, traffic and refusals of this peer."""
        return self._state.counts

    @property
    def history(self) -> dict[str, list[PyTree]]:
        """Recorded rows, by name of the loop."""
        return {name: [row.value for row in rows] for name, rows in self._state.records.items()}

    def leave(self) -> None:
        """Transfer this peer's mass and leave the run at the next exchange of mass; `run` then raises `Left`."""
        if not self.tolerant or self.members is None:
            raise InvalidInput("mode", "synchronous", "asynchronous, to leave without stopping the others")
        self._asked_to_leave = True

    def run(
        self,
        program: Node | ProgramRecipe,
        state: PyTree,
        data: PyTree,
        record: Mapping[str, Record] | None = None,
        every: int = 1,
        progress: Progress | None = None,
    ) -> PyTree:
        """Run the program from `state`, and return the final state."""
        recipe, where = as_recipe(program), self._state
        program = recipe.program()
        self._record, self._every, self._progress = recorders_of(record), every, progress
        check_repairable(program, self.tolerant)
        self._program, self._start = stepwise(program), state
        self._functions = ClientFunctions(recipe, self.client, self.network.clients, self.key, data)
        self._apply = self._functions.apply
        with turns:  # so that only one peer of a process traces the program, and the others reuse the trace
            found = profile(spelled_out(recipe), state, data, self.network.clients)
        check_recording(self._record, every, found)
        self._agreement = self.network.flood_rounds() if found.has_votes else 1
        self._profile = found
        self._channels.open(self._program, found, self.tolerant)
        self._trees = TreeAverages.of(self.network, self.key, self._messenger, found)
        where.first = where.step
        if self.store is not None and (stored := self.store.load()) is not None:
            self._resumed = SavedPeer(stored)
            self._ahead = self._resumed.frames(self._program, found)
            self._resumed.restore(where)
        self._draw()
        while True:
            where.begin(self._record)
            try:
                state = self._finish(self._run_program())
                break
            except NewView:
                where.frames, where.loops = [], []
                self._go_back(where.first)
                self._channels.restart((), self._state.epoch(()))
        where.counts.work = found.total(where.passes)
        return state

    def result(self, state: PyTree) -> RunResult:
        """Return the result of the run for this client alone, without client axes."""
        counts = self.counts
        return RunResult(
            states=state,
            step=self.step,
            rounds=counts.rounds,
            floats=counts.floats,
            work=counts.work,
            history={name: stack(rows) for name, rows in self.history.items() if rows},
            late=counts.late,
            rejected=dict(counts.rejections),
            isolated=counts.isolation,
            clocks=self._state.clocks,
            bytes=np.asarray([counts.bytes], np.int64),
        )

    # ------------------------------------------------------------------ nodes

    def _run_program(self) -> PyTree:
        """Return the state at the end of the program, computed or restored."""
        if self._resumed is not None and self._state.stage and not self._state.leaving:
            state = self._restore(self._profile.result)
            self._resumed = None
            return state
        state = self._run_node(self._program, self._start, PeerCursor())
        self._messenger.check_finite(state)
        return state

    def _run_node(self, node: Node, state: PyTree, at: PeerCursor) -> PyTree:
        run = self._run.get(type(node))
        if run is None:
            raise HyperpushError(f"a peer cannot run {type(node).__name__}")
        return run(node, state, at)

    def _run_sequence(self, node: Sequence, state: PyTree, at: PeerCursor) -> PyTree:
        frame = self._enter(Frame(0))
        for position in range(frame.at, len(node.nodes)):
            frame.at = position
            state = self._run_node(node.nodes[position], state, at.child(node, position))
        self._state.frames.pop()
        return state

    def _run_scope(self, node: Scope, state: PyTree, at: PeerCursor) -> PyTree:
        where = self._state
        rows = {name: len(recorded) for name, recorded in where.records.items()}
        frame = self._enter(Frame(where.step, outer=state, rows=rows))
        state, depth, loops = frame.outer, len(where.frames), len(where.loops)
        while True:
            try:
                inner = None  # a resumed peer gets the state from its stored exchange
                if self._resumed is None:
                    self._channels.restart(at.path, self._state.epoch(at.address))
                    inner = self._apply(at, Role.ENTER, state)
                inner = self._run_node(node.body, inner, at.body)
                if self._channels.tolerant(at.path):
                    await_missing(self._messenger)
                break
            except NewView:
                if self._channels.has_sums_around(at.path):  # sums outside the scope must restart, too
                    raise
                del where.frames[depth:], where.loops[loops:]
                where.keep_rows(frame.rows)
                self._go_back(frame.at)
        where.frames.pop()
        self._end_stage(at.path)
        return self._apply(at, Role.LEAVE, state, inner)

    def _end_stage(self, scope: Path | None) -> None:
        """Count the averages that end with a scope, and those that contain little of other parties' values.

        `scope` is None at the end of the program.
        """
        for channel in self._channels.ending(scope):
            if channel.due:
                self.counts.end_stage(channel.isolated)

    def _run_repeat(self, node: Repeat, state: PyTree, at: PeerCursor) -> PyTree:
        where, frame = self._state, self._enter(Frame(0, -1))
        if frame.times < 0:
            wanted = node.at_most if node.times is None else int(self._apply(at, Role.TIMES, state))
            frame.times = min(node.at_most, wanted)
        record = self._record.get(node.name)
        if record is not None and record.entry and frame.at == 0 and self._resumed is None:
            where.record(node.name, self._apply(at._replace(round=0), Role.RECORD, state, record=record.f))
        for i in range(frame.at, frame.times):
            frame.at, now = i, at.iteration(i)
            where.loops.append((node.name, i))
            state = self._run_node(node.body, state, now.body)
            self._messenger.check_finite(state)
            where.loops.pop()
            if node.agreed:
                where.passes[at.body.path] += 1
            ended = node.until is not None and bool(self._apply(now, Role.UNTIL, state))
            if node.votes:
                ended = self._agree(ended, at.path)
            if record is not None and record.due(i + 1, self._every):
                where.record(node.name, self._apply(now, Role.RECORD, state, record=record.f))
            if self._progress is not None:
                self._progress(node.name, frame.times if ended else i + 1, frame.times)
            if ended:
                break
        where.frames.pop()
        return state

    def _agree(self, content: bool, path: Path) -> bool:
        objection = np.asarray(not content, np.float32)
        for _ in range(self._agreement):
            links = self._links("ones")
            self._messenger.send(path, objection, np.flatnonzero(links.to), np.ones(self.network.clients))
            for _, other, _ in self._messenger.receive(path, links.heard, links.heard.astype(float)):
                objection = np.asarray(np.maximum(objection, other))
            self._tick(path, links.to)
        return bool(objection == 0)

    def _enter(self, fresh: Frame) -> Frame:
        """Return the frame of a node: the stored one in a resumed peer, else `fresh`."""
        frame = self._ahead.pop(0) if self._ahead else fresh
        self._state.frames.append(frame)
        return frame

    # --------------------------------------------------------------- messages

    def _run_exchange(self, node: Exchange, state: PyTree, at: PeerCursor) -> PyTree:
        resumed = self._resumed is not None
        if resumed:
            state = self._restore(self._profile.states[at.path])
        channel, links = self._channels.current[at.path], self._links(node.link_weights)
        message = jax.tree.map(np.asarray, self._apply(at, Role.SEND, state))
        if channel.tolerant:
            if self._state.leaving or (self._asked_to_leave and not resumed):
                self._leave(node, channel, state, at)
            save = partial(self._save, state, True)
            received = exchange_totals(self._messenger, channel, message, links, resumed, save)
        else:
            self._save(state, False)

            def own_weights() -> np.ndarray:
                return np.asarray(self._apply(at, Role.WEIGHTS, state))

            received = exchange_messages(self._messenger, node, at.path, message, links, own_weights)
        self._tick(at.path, links.to)
        return self._receive(node, at, state, received)

    def _receive(self, node: Exchange, at: PeerCursor, state: PyTree, received: Received) -> PyTree:
        """Return the state after the messages of an exchange are received."""
        inbox = Inbox(received.total, jnp.asarray(received.own))
        if node.observe:
            heard = np.zeros(self.network.clients, bool)
            heard[received.senders] = True
            inbox = Inbox(inbox.total, inbox.own, jnp.asarray(heard), jnp.asarray(received.weights))
        return self._apply(at, Role.RECEIVE, state, inbox)

    def _receive_late(self, node: Exchange, channel: Channel, at: PeerCursor, state: PyTree) -> PyTree:
        """Apply late mass as an exchange with self-weight 1 and no messages; return the new state."""
        late = PeerCursor(channel.path, (*at.address, LATE), at.round)
        nobody = np.asarray(jnp.zeros(self.network.clients))
        return self._receive(node, late, state, Received(channel.take(), 1.0, [], nobody))

    def _run_server(self, node: Server, state: PyTree, at: PeerCursor) -> PyTree:
        if self._resumed is not None:
            state = self._restore(self._profile.states[at.path])
        self._save(state, False)
        message = jax.tree.map(np.asarray, self._apply(at, Role.SEND, state))
        key = in_turn(lambda: compute_key(self.key, np.asarray(at.address, np.uint32)))
        answer = ask_server(self._messenger, node, at.path, message, key, self.network.clients)
        self._tick(at.path, np.ones(1, bool))
        return self._apply(at, Role.RECEIVE, state, jax.tree.map(jnp.asarray, answer))

    def _run_average(self, node: Average, state: PyTree, at: PeerCursor) -> PyTree:
        """Run an average along a tree; all other averages have been expanded."""
        if self._resumed is not None:
            state = self._restore(self._profile.states[at.path])
        self._save(state, False)
        value, mass = self._apply(at, Role.ENTER, state)
        assert self._trees is not None

        def answer(mean: PyTree) -> np.ndarray | None:
            return None if node.ends is None else np.asarray(self._apply(at, Role.UNTIL, take(mean)))

        def take(mean: PyTree) -> PyTree:
            return self._apply(at, Role.LEAVE, state, jax.tree.map(jnp.asarray, mean), mass)

        mean, told = self._trees.mean(at.path, jax.tree.map(np.asarray, value), answer)
        after = take(mean)
        return after if node.ends is None else with_answer(after, jnp.asarray(told))

    def _links(self, weights: Weights) -> ClientLinks:
        links = links_at(self.network, self.key, self.step, self.client, weights)
        out = sorted(self.closed | self._messenger.leaving)
        return links.without(out) if out else links

    def _tick(self, path: Path, links: np.ndarray) -> None:
        """Count an exchange in which a message was sent over `links` (True for each link used)."""
        channel = self._channels.current[path]
        self._state.tick(channel.floats, channel.bytes * int(links.sum()))

    # ---------------------------------------------------------------- members

    def _go_back(self, step: int) -> None:
        """Go back to `step`, to restart from there with the remaining members."""
        assert self.members is not None
        where = self._state
        if not self._repeats:
            cost = ", and starting anew would cost more than the ε of the run"
            raise self.members.failure("removed:", self.members.closed - self.closed, cost)
        where.closed, where.step, where.stage, where.heir = self.members.closed, step, Stage.RUNNING, None
        self._draw()
        self.members.done(False)

    def _draw(self) -> None:
        """Set the key of secret draws. Each view has a new key: equal noise on two values reveals their difference."""
        if self._secret is not None:
            view = self._state.view
            self._functions.draws = jax.random.fold_in(self._secret, view) if self.closed else self._secret

    def _finish(self, state: PyTree) -> PyTree:
        """Wait until all members have received all messages and are done. Return the final state.

        Late mass on lasting channels is applied as an exchange with self-weight 1.
        """
        if self.members is None:
            return state
        if not self.tolerant:
            if self._state.stage < Stage.OVER:
                self.members.finish()
                self._state.stage = Stage.OVER  # if it is killed and restarted now, it needs no other peer
                self._save(state, True)
            return state
        lasting = [channel for channel in self._channels.tolerant() if channel.lasting]
        drain(self._messenger, lasting, lambda: self._save(state, True))
        for channel in lasting:
            if np.any(channel.pending):
                at_channel = PeerCursor(channel.path, channel.path)
                state = self._receive_late(node_at(self._program, channel.path), channel, at_channel, state)
        self._end_stage(None)
        return state

    def _leave(self, node: Exchange, channel: Channel, state: PyTree, at: PeerCursor) -> NoReturn:
        """Transfer the whole mass and leave. A peer that is killed meanwhile continues to leave after a restart."""
        self._state.leaving = True
        self._save(state, True)

        def held() -> PyTree:
            return self._apply(at, Role.SEND, self._receive_late(node, channel, at, state))

        def save() -> None:
            empty = self._state.heir is not None
            self._save(jax.tree.map(jnp.zeros_like, state) if empty else state, True)

        others = [other for other in range(self.network.clients) if other != self.client]
        transfer_mass(self._messenger, channel, others, held, save)

    # ---------------------------------------------------------------- durable

    def _save(self, state: PyTree, always: bool) -> None:
        """Save the peer before it sends the messages of an exchange; with `always`, regardless of `store_every`."""
        if self._resumed is not None:  # this exchange is the stored one
            self._resumed = None
            return
        if self.store is None or not (always or (self.step - self._state.first) % self.store_every == 0):
            return
        if self.members is not None:
            self._state.left = self.members.left
        self.store.save(pack(state, self._state, self._channels))
        if self.members is not None:
            self.members.acknowledge(self._state.clock)

    def _restore(self, like: PyTree) -> PyTree:
        """Restore the totals and records of the stored exchange. Return its state, in the shapes of `like`."""
        assert self._resumed is not None
        self._resumed.restore_totals(self._channels)
        for name, recorder in self._record.items():
            shapes = record_shapes(self._profile, name, recorder, self.network.clients, self._functions.data)
            self._state.records[name] = self._resumed.rows(name, shapes)
        return as_tree(self._resumed.facts["state"], like)


def spelled_out(recipe: ProgramRecipe) -> ProgramRecipe:
    """Return the program in the form that a peer walks: all averages, except along a tree, as single exchanges."""
    return ProgramRecipe(_stepwise, (recipe,))


def _stepwise(recipe: ProgramRecipe) -> Node:
    return stepwise(recipe.program())
