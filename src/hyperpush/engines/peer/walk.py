"""One client of a run: it walks the program, node by node."""

import time
from collections.abc import Mapping
from typing import final

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import ArrayLike, PRNGKeyArray, PyTree

from hyperpush.engines.checks import check_recording, check_repairable
from hyperpush.engines.peer.durable import Saved, Store, packed, shaped_after
from hyperpush.engines.peer.ending import hand_over, settle
from hyperpush.engines.peer.leaves import Leaves, combine, compiling, compute_key, links
from hyperpush.engines.peer.mail import Mail
from hyperpush.engines.peer.members import Members, NewView
from hyperpush.engines.peer.places import Place, flattened
from hyperpush.engines.peer.walked import Counts, Frame, Stage, Walked
from hyperpush.engines.result import Progress, Record, RowClock, recorders_of
from hyperpush.engines.transport import Transport
from hyperpush.errors import HyperpushError, InvalidInput
from hyperpush.networks import Network, Weights
from hyperpush.programs import (
    Exchange,
    Inbox,
    Local,
    Node,
    Path,
    Recipe,
    Repeat,
    Role,
    Scope,
    Sequence,
    Server,
    as_recipe,
    at,
    contains,
    profile,
    stepwise,
)

SERVER = 0  # the peer that plays the server
LATE = (1 << 31) - 1  # part of the key of what takes in late mass: no loop gets there

Address = tuple[int, ...]  # positions and iterations on the way to a node


@final
class Peer:
    """One client of a run.

    `tolerant` says that links may lose messages, so that conserved quantities are sent as running sums; all peers of
    a run must say the same. `store` makes the peer durable; every exchange with running sums is stored, others each
    `store_every` exchanges. `secret` is the key of its leaves' draws, such as noise for privacy, in place of one that
    follows from `key`, which all peers know; a peer that is restarted must have the same, and a new view draws anew.
    Without `repeats` it ends with an error rather than start anew in a new view: what is private was paid for once.
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
        store: Store | None = None,
        store_every: int = 1,
        secret: PRNGKeyArray | None = None,
        repeats: bool = True,
    ):
        self.client, self.network, self.transport, self.key = client, network, transport, key
        self.tolerant, self.store, self.store_every = tolerant, store, store_every
        self._secret, self._repeats = secret, repeats
        self._walked = Walked(step)
        self._mail = Mail(client, transport, tolerant, self._walked)
        self._places = self._mail.places
        self._ahead: list[Frame] = []  # where we have yet to come back to, outermost first
        self._resumed: Saved | None = None
        self._asked_to_leave = False

    @property
    def step(self) -> int:
        return self._walked.step

    @property
    def closed(self) -> frozenset[int]:
        """Who is out of the view."""
        return self._walked.closed

    @property
    def counts(self) -> Counts:
        return self._walked.counts

    @property
    def history(self) -> dict[str, list[PyTree]]:
        return self._walked.history

    @property
    def clocks(self) -> dict[str, RowClock]:
        return self._walked.clocks

    def leave(self) -> None:
        """Leave the run for good at the next exchange of mass, and hand it over; `run` then raises `Left`."""
        if not self.tolerant or not isinstance(self.transport, Members):
            raise InvalidInput("mode", "synchronous", "asynchronous, to leave without stopping the others")
        self._asked_to_leave = True

    def run(
        self,
        program: Node | Recipe,
        state: PyTree,
        data: PyTree,
        record: Mapping[str, Record] | None = None,
        every: int = 1,
        progress: Progress | None = None,
    ) -> PyTree:
        """Walk the program from `state`; the state at its end."""
        recipe, walked = as_recipe(program), self._walked
        program = recipe.program()
        self._record = recorders_of(record)
        check_recording(self._record, every, program)
        check_repairable(program, self.tolerant)
        program = stepwise(program)
        self._program, self._start = program, state
        self._leaves = Leaves(recipe, self.client, self.network.clients, self.key, data)
        self._apply = self._leaves.apply
        self._every, self._progress = every, progress
        with compiling:  # peers of one process wait for one to trace the program
            found = profile(Recipe(_stepwise, (recipe,)), state, data, self.network.clients)
        self._agreement = 1
        if any(loop.until is not None for _, _, loop in found.loops):
            self._agreement = self.network.flood_rounds()
        for sending in found.sendings:
            conserved = isinstance(sending.node, Exchange) and sending.node.conserved
            infinite = isinstance(sending.node, Exchange) and sending.node.reduce == "max"
            lasting = _within(program, sending.path) is None
            self._places.add(
                Place(sending.path, sending.message, conserved and self.tolerant, infinite, lasting=lasting)
            )
        walked.first = walked.step
        if self.store is not None and (stored := self.store.load()) is not None:
            self._resumed = Saved(*stored)
            self._ahead = self._resumed.frames(program, state, self._leaves.shapes)
            self._resumed.set_back(walked)
        self._draw()
        while True:
            walked.begin(self._record)
            try:
                if self._resumed is not None and walked.stage and not walked.leaving:
                    state = self._restored(shaped_after(program, self._start, self._leaves.shapes))
                    self._resumed = None
                else:
                    state = self._walk(program, self._start, 0, (), ())
                    self._mail.check_finite(state)
                state = self._settle(program, state)
                break
            except NewView:
                walked.frames, walked.loops = [], []
                self._back_to(walked.first)
                self._places.restart((), self._epoch(()))
        walked.counts.work = found.total(walked.passes)
        return state

    # ------------------------------------------------------------------- walk

    def _walk(self, node: Node, state: PyTree, round: int, address: Address, path: Path) -> PyTree:
        if isinstance(node, Local):
            return self._apply(path, Role.LOCAL, address, round, state)
        if isinstance(node, Sequence):
            frame = self._enter(Frame(0))
            for position in range(frame.at, len(node.nodes)):
                frame.at = position
                state = self._walk(node.nodes[position], state, round, (*address, position), (*path, position))
            self._walked.frames.pop()
            return state
        if isinstance(node, Scope):
            return self._within(node, state, round, address, path)
        if isinstance(node, Repeat):
            return self._repeat(node, state, round, address, path)
        if isinstance(node, Exchange):
            return self._exchange(node, state, round, address, path)
        if isinstance(node, Server):
            return self._serve(node, state, round, address, path)
        raise HyperpushError(f"a peer cannot walk {type(node).__name__}")

    def _within(self, node: Scope, state: PyTree, round: int, address: Address, path: Path) -> PyTree:
        walked = self._walked
        rows = {name: len(recorded) for name, recorded in walked.history.items()}
        frame = self._enter(Frame(walked.step, outer=state, rows=rows))
        state, depth, loops = frame.outer, len(walked.frames), len(walked.loops)
        while True:
            try:
                if self._resumed is None:
                    self._places.restart(path, self._epoch(address))
                    inner = self._apply(path, Role.ENTER, address, round, state)
                else:
                    inner = self._leaves.shapes(node.enter, state)
                inner = self._walk(node.body, inner, round, address, (*path, 0))
                self._wait_for_the_missing(path)
                break
            except NewView:
                if self._around(path):  # sums that began before it are of the old view, too
                    raise
                # From what the state was before.
                del walked.frames[depth:], walked.loops[loops:]
                walked.forget(frame.rows)
                self._back_to(frame.at)
        walked.frames.pop()
        return self._apply(path, Role.LEAVE, address, round, state, inner)

    def _repeat(self, node: Repeat, state: PyTree, round: int, address: Address, path: Path) -> PyTree:
        walked, frame = self._walked, self._enter(Frame(0, -1))
        if frame.times < 0:
            frame.times = node.at_most
            if node.times is not None:
                frame.times = min(node.at_most, int(self._apply(path, Role.TIMES, address, round, state)))
        record, times = self._record.get(node.name), frame.times
        if record is not None and record.entry and frame.at == 0 and self._resumed is None:
            walked.note(node.name, self._apply(path, Role.RECORD, address, 0, state, record=record.f))
        for i in range(frame.at, times):
            frame.at = i
            walked.loops.append((node.name, i))
            state = self._walk(node.body, state, i, (*address, i), (*path, 0))
            self._mail.check_finite(state)
            walked.loops.pop()
            if node.agreed:
                walked.passes[(*path, 0)] += 1
            ended = False
            if node.until is not None:
                content = bool(self._apply(path, Role.UNTIL, (*address, i), i, state))
                ended = self._agree(content, path)
            if record is not None and (i + 1) % self._every == 0:
                walked.note(node.name, self._apply(path, Role.RECORD, (*address, i), i, state, record=record.f))
            if self._progress is not None:
                self._progress(node.name, times if ended else i + 1, times)
            if ended:
                break
        walked.frames.pop()
        return state

    def _agree(self, content: bool, path: Path) -> bool:
        objection = np.asarray(not content, np.float32)
        for _ in range(self._agreement):
            _, _, to, heard = self._links("ones")
            self._mail.send(path, objection, np.flatnonzero(to), np.ones(self.network.clients))
            for _, other, _ in self._mail.receive(path, heard):
                objection = np.asarray(np.maximum(objection, other))
            self._tick(path, to)
        return bool(objection == 0)

    def _enter(self, fresh: Frame) -> Frame:
        """Go into a node: for the first time, or to where we were when it was stored."""
        frame = self._ahead.pop(0) if self._ahead else fresh
        self._walked.frames.append(frame)
        return frame

    # --------------------------------------------------------------- messages

    def _exchange(self, node: Exchange, state: PyTree, round: int, address: Address, path: Path) -> PyTree:
        resumed = self._resumed is not None
        if resumed:
            state = self._restored(state)
        place, mail = self._places.current[path], self._mail
        own, weights, to, expected = self._links(node.link_weights)
        message = jax.tree.map(np.asarray, self._apply(path, Role.SEND, address, round, state))
        if place.tolerant:
            if self._walked.leaving or (self._asked_to_leave and not resumed):
                self._leave(node, place, state, round, address)
            targets = np.flatnonzero(to).tolist()
            if resumed:  # the totals hold this exchange's shares already
                own, targets = np.asarray(self._walked.own, own.dtype), list(place.outgoing.totals)
            else:
                own, weights = self._held_back(place, targets, own, weights)
                flat = flattened(message)
                mail.check_finite(flat)
                for target in np.flatnonzero(weights).tolist():
                    place.outgoing.add(target, np.float64(weights[target]) * flat)
                self._walked.own = float(own)
            self._save(state, True)
            mail.acknowledge_owed()
            for target in targets:
                mail.post_total(place, target)
            mail.say_farewell()
            senders = [header.sender for header, _ in mail.collect(path, expected)]
            total = place.taken()
        else:
            self._save(state, False)
            mail.send(path, message, np.flatnonzero(to), weights)
            arrived = mail.receive(path, expected)
            senders = [sender for sender, _, _ in arrived]
            if callable(node.weights):
                mine = np.asarray(self._apply(path, Role.WEIGHTS, address, round, state))
                arrived = [(sender, value, float(mine[sender])) for sender, value, _ in arrived]
                own = mine[self.client]
            elif node.weights == "reverse":
                arrived = [(sender, value, float(weights[sender])) for sender, value, _ in arrived]
            total = combine(message, arrived, node.reduce, self.network.clients)
        self._tick(path, to)
        return self._taken(node, path, state, total, own, round, address, senders, weights)

    def _taken(
        self,
        node: Exchange,
        path: Path,
        state: PyTree,
        total: PyTree,
        own: ArrayLike,
        round: int,
        address: Address,
        senders: list[int] | None = None,
        weights: np.ndarray | None = None,
    ) -> PyTree:
        """The state after an inbox; without senders, of what comes late and is added to all of one's own."""
        inbox = Inbox(total, jnp.asarray(own))
        if node.observe:
            heard = np.zeros(self.network.clients, bool)
            heard[senders or []] = True
            sent = jnp.zeros(self.network.clients) if weights is None else jnp.asarray(weights)
            inbox = Inbox(total, inbox.own, jnp.asarray(heard), sent)
        return self._apply(path, Role.RECEIVE, address, round, state, inbox)

    def _serve(self, node: Server, state: PyTree, round: int, address: Address, path: Path) -> PyTree:
        n, message = self.network.clients, self._apply(path, Role.SEND, address, round, state)
        message = jax.tree.map(np.asarray, message)
        shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((n, *leaf.shape), leaf.dtype), message)
        key = compute_key(self.key, np.asarray(address, np.uint32))
        down, mail = (*path, 1), self._mail
        others = np.arange(n) != SERVER
        if self.client == SERVER:
            arrived = {sender: value for sender, value, _ in mail.all(path, others)}
            everyone = [message if other == SERVER else arrived[other] for other in range(n)]
            answers = node.compute(jax.tree.map(lambda *rows: jnp.stack(rows), *everyone), key)
            answers = jax.tree.map(np.asarray, answers)
            for other in np.flatnonzero(others).tolist():
                mail.post(down, other, jax.tree.map(lambda rows, k=other: rows[k], answers))
            answer = jax.tree.map(lambda rows: rows[SERVER], answers)
        else:
            mail.post(path, SERVER, message)
            if down not in self._places.current:
                if node.host:
                    raise HyperpushError("a server that computes in plain Python runs on simulate and shard only")
                answer_shapes = jax.eval_shape(node.compute, shapes, key)
                one = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape[1:], s.dtype), answer_shapes)
                self._places.add(Place(down, one, False, False))
            answer = mail.all(down, ~others)[0][1]
        self._tick(path, np.ones(1, bool))
        return self._apply(path, Role.RECEIVE, address, round, state, jax.tree.map(jnp.asarray, answer))

    def _links(self, weights: Weights) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        own, shares, to, heard = links(self.network, self.key, self.step, self.client, weights)
        if out := sorted(self.closed | self._mail.leaving):  # what would go to them stays here
            own = np.asarray(own + shares[out].sum(dtype=shares.dtype))
            shares, to, heard = shares.copy(), to.copy(), heard.copy()
            shares[out], to[out], heard[out] = 0, False, False
        return own, shares, to, heard

    def _held_back(
        self, place: Place, targets: list[int], own: np.ndarray, weights: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Keep the shares of those that have not seen the last one: the total that they get again is all they need.

        Else whoever is not heard, and hears nothing, would soon have pushed away all of its mass ω, and x = z/ω would
        move by rate·∇f/ω. Any weights that add up to 1 do for push-sum.
        """
        if not isinstance(self.transport, Members):
            return own, weights
        late = place.held_back(targets)
        weights = np.where(np.isin(np.arange(weights.size), targets), weights, 0)
        own = np.asarray(own + weights[late].sum(dtype=weights.dtype))
        weights[late] = 0
        return own, weights

    def _tick(self, path: Path, links: np.ndarray) -> None:
        """An exchange has taken place, in which a message went over those of the links."""
        place = self._places.current[path]
        self._walked.step += 1
        self.counts.rounds += 1
        self.counts.floats += place.floats
        self.counts.bytes += place.bytes * int(links.sum())

    # ---------------------------------------------------------------- members

    def _wait_for_the_missing(self, path: Path) -> None:
        """Before an average ends, who is gone comes back or is closed out: part of its mass would be in it for ever."""
        if not isinstance(self.transport, Members) or not self._places.tolerant(path):
            return
        while self.transport.missing():
            time.sleep(0.05)
        self._mail.check_view()

    def _back_to(self, step: int) -> None:
        """What began at `step` begins anew, in the view of those who are left."""
        assert isinstance(self.transport, Members)
        if not self._repeats:
            gone = sorted(self.transport.closed - self.closed)
            raise HyperpushError(
                f"peer {self.client}: {gone} are closed out, and to start anew would cost more than the ε of the run"
            )
        self._walked.closed, self._walked.step = self.transport.closed, step
        self._walked.stage, self._walked.heir = Stage.WALKING, None
        self._draw()
        self.transport.done(False)

    def _epoch(self, address: Address) -> Path:
        """What tells running sums that begin here from all others: where, and in which view."""
        return (*address, self._walked.view) if self.closed else address

    def _around(self, path: Path) -> bool:
        """Whether the state around a `Scope` has running sums of its own."""
        outside = [place.path for place in self._places.tolerant() if place.path[: len(path)] != path]
        inner = [_within(self._program, place) for place in outside]
        return any(around is None or path[: len(around)] == around for around in inner)

    def _draw(self) -> None:
        """Draw from the secret, in every view other numbers: the same noise on two values would give both away."""
        if self._secret is not None:
            self._leaves.draws = jax.random.fold_in(self._secret, self._walked.view) if self.closed else self._secret

    def _settle(self, program: Node, state: PyTree) -> PyTree:
        """The end of a run among members: everybody has taken in what was sent to it, and nobody needs anything more.

        What is still on its way at places whose state lives on is taken in as an exchange in which one keeps all.
        """
        if not isinstance(self.transport, Members):
            return state
        if not self.tolerant:
            self.transport.finish()
            return state
        lasting = [place for place in self._places.tolerant() if place.lasting]
        settle(self._mail, lasting, lambda: self._save(state, True))
        for place in lasting:
            if np.any(place.pending):
                node, address = at(program, place.path), (*place.path, LATE)
                state = self._taken(node, place.path, state, place.taken(), 1.0, 0, address)
        return state

    def _leave(self, node: Exchange, place: Place, state: PyTree, round: int, address: Address) -> None:
        """Hand everything over. Killed meanwhile, it goes on leaving."""
        self._walked.leaving = True
        self._save(state, True)

        def held() -> PyTree:
            all_of_it = self._taken(node, place.path, state, place.taken(), 1.0, round, (*address, LATE))
            return self._apply(place.path, Role.SEND, address, round, all_of_it)

        def save() -> None:
            empty = self._walked.heir is not None
            self._save(jax.tree.map(jnp.zeros_like, state) if empty else state, True)

        others = [other for other in range(self.network.clients) if other != self.client]
        hand_over(self._mail, place, others, held, save)

    # ---------------------------------------------------------------- durable

    def _save(self, state: PyTree, always: bool) -> None:
        """Make durable that this exchange is about to be sent."""
        if self._resumed is not None:  # it is what we come from
            self._resumed = None
            return
        if self.store is None or not (always or (self.step - self._walked.first) % self.store_every == 0):
            return
        if isinstance(self.transport, Members):
            self._walked.left = self.transport.left
        self.store.save(*packed(state, self._walked, self._places))
        if isinstance(self.transport, Members):
            self.transport.acknowledge(self._walked.clock)

    def _restored(self, state: PyTree) -> PyTree:
        """The state, totals and records of the exchange that was stored."""
        assert self._resumed is not None
        self._resumed.totals(self._places)
        self._walked.history |= self._resumed.history(self._record, self._program, self._start, self._leaves.shapes)
        self._walked.moments |= self._resumed.moments()
        return self._resumed.tree("state", state)


def _stepwise(recipe: Recipe) -> Node:
    return stepwise(recipe.program())


def _within(program: Node, path: Path) -> Path | None:
    """The innermost `Scope` around a place, whose state ends with it; None if there is none."""
    around = [path[:depth] for depth in range(len(path)) if isinstance(at(program, path[:depth]), Scope)]
    return around[-1] if around else None


def check_conserved(program: Node) -> None:
    """Refuse, where every peer goes at its own pace, programs whose messages must come in time."""
    check_repairable(program, True)
    if contains(program, lambda node: isinstance(node, Exchange) and not node.conserved):
        raise InvalidInput(
            "mode", "asynchronous", "synchronous: this program has messages that cannot come late (not conserved)"
        )
