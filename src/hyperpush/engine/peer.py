"""One client per process or thread: it walks the program around its own jitted leaves and talks through a transport.

Everything that arrives is bytes from outside: it is decoded and checked before it touches the state, and what does not
fit is counted and dropped. On links that lose messages, conserved quantities travel as running sums per link.

A peer with a `Store` writes where it is in the program, its state and the totals of its links before it sends: killed
at any moment, it goes on from there, sends the same again, and no mass is lost or doubled.
"""

import threading
import time
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PRNGKeyArray, PyTree

from hyperpush.averaging.running_sums import Incoming, Outgoing
from hyperpush.counting import Work
from hyperpush.engine import keys, wire
from hyperpush.engine.compiled import (
    OUTSIDE,
    Outcome,
    Progress,
    Record,
    check_clients,
    check_recording,
    check_repairable,
)
from hyperpush.engine.faults import Faults
from hyperpush.engine.placement import alive_rows, weight_rows
from hyperpush.engine.transport import Memory, Transport
from hyperpush.errors import Diverged, HyperpushError, InvalidInput
from hyperpush.networks import Network, Weights, lowest
from hyperpush.program import (
    Context,
    Exchange,
    Inbox,
    Local,
    Node,
    Path,
    Repeat,
    Role,
    Sequence,
    Server,
    Within,
    children,
    contains,
    leaf_key,
    stepwise,
    survey,
)

SERVER = 0  # the peer that plays the server


_compiling = threading.RLock()
_compiled: weakref.WeakSet[Any] = weakref.WeakSet()


def _shared(what: Any, call: Callable[[], Any]) -> Any:
    """`call()`, the first time for `what` by one thread alone: peers of one process wait for it to compile, once."""
    if what in _compiled:
        return call()
    with _compiling:
        result = call()
        _compiled.add(what)
        return result


@eqx.filter_jit
def _leaf(f, role, args, client, clients, round, root, address, data):
    return f(*args, Context(client, clients, round, leaf_key(_walked(root, address), role, client), data))


@eqx.filter_jit
def _compute_key(root, address):
    return leaf_key(_walked(root, address), Role.COMPUTE, 0)


def _walked(root, address):
    key = keys.program_key(root)
    for place in range(address.shape[0]):
        key = jax.random.fold_in(key, address[place])
    return key


@eqx.filter_jit
def _schedule(network, root, step, client, weights):
    """(own weight, weights by receiver, who hears me, whom I hear) of one client at one step."""
    everyone = network.links(keys.network_key(root), step, jnp.arange(network.clients), weights)
    rows, alive = weight_rows(everyone, network.clients), alive_rows(everyone, network.clients)
    return everyone.own[client], rows[client], alive[client], alive[:, client]


@runtime_checkable
class Store(Protocol):
    """Where a peer keeps what it needs to go on after it was killed."""

    def save(self, arrays: Mapping[str, np.ndarray], facts: Mapping[str, Any]) -> None:
        """Make both durable, together, in place of what was saved before."""
        ...

    def load(self) -> tuple[dict[str, np.ndarray], dict[str, Any]] | None:
        """What was saved last."""
        ...


@runtime_checkable
class Members(Transport, Protocol):
    """A transport that knows who is there."""

    closed: frozenset[int]  # those who vanished for good
    leaving: frozenset[int]  # those who said that they leave, and those who have left

    def acknowledge(self, step: int) -> None:
        """Nothing before `step` will be needed again."""
        ...

    def done(self, finished: bool = True) -> None:
        """Tell everybody whether this peer needs nothing more."""
        ...

    def everyone_done(self) -> bool:
        """Whether all others that are not closed out are done."""
        ...

    def finish(self) -> None:
        """Be done and wait for the others."""
        ...

    def leave(self, left: bool) -> None:
        """Tell everybody that this peer leaves for good, or that it has handed over all that it held."""
        ...

    def present(self, clients: list[int]) -> list[int]:
        """Who of them is there and not done."""
        ...

    def missing(self) -> bool:
        """Whether somebody is gone who is neither done nor closed out."""
        ...


class NewView(Exception):
    """Others have been closed out: averages start anew among the rest."""


class Left(HyperpushError):
    """This peer has left the run, as it was asked to, and handed its mass over."""


@dataclass
class Frame:
    """A node that the walk is inside of, and what it takes to come back to that place."""

    at: int  # the position in a sequence, the iteration of a loop; the step at which a `Within` was entered
    times: int = 0  # of a loop
    outer: PyTree = None  # the state around a `Within`


@dataclass
class Counts:
    """What a peer has seen of its network."""

    rounds: int = 0
    floats: int = 0
    work: Work = field(default_factory=Work)  # once the program has ended
    late: int = 0
    rejections: wire.Rejections = field(default_factory=wire.Rejections)


class _Place:
    """A place of the program that sends: what its messages look like, and the running sums of its links."""

    def __init__(self, path: Path, message: PyTree, tolerant: bool, infinite: bool, epoch: Path = ()):
        self.path, self.message, self.tolerant, self.epoch = path, message, tolerant, epoch
        self.number = _number(path, epoch)  # its name on the wire
        self.acknowledges = _number(path, epoch, "ack")  # that of what says which total was taken in
        example = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), message)
        self.floats = sum(leaf.size for leaf in jax.tree.leaves(example))
        self.template = wire.Template(np.zeros(self.floats) if tolerant else example, infinite)
        self.outgoing, self.incoming = Outgoing(self.floats), Incoming(self.floats)
        self.pending = np.zeros(self.floats)  # taken in since the last exchange here
        self.acknowledged: dict[int, int] = {}  # the newest counter that each target is known to have taken in
        self.last: set[int] = set()  # senders that have put their last total on the link

    def unravel(self, flat: np.ndarray) -> PyTree:
        """A flat vector in the shapes and types of the message."""
        leaves, structure = jax.tree.flatten(self.message)
        parts = np.split(flat, np.cumsum([leaf.size for leaf in leaves])[:-1])
        shaped = [part.reshape(leaf.shape).astype(leaf.dtype) for part, leaf in zip(parts, leaves, strict=True)]
        return structure.unflatten([jnp.asarray(part) for part in shaped])


def _number(path: Path, epoch: Path, *more: str) -> int:
    return zlib.crc32(repr((path, epoch or 0, *more)).encode())


_ACKNOWLEDGEMENT = np.zeros(0)
_ACKNOWLEDGE = wire.Template(_ACKNOWLEDGEMENT)
LAST_TOTAL = 0.5  # the weight that marks the last total on a link
RESEND = 0.05  # seconds before totals that nobody has acknowledged are sent again, at first
LAST = (1 << 62) - 1  # a step after all others


class Peer:
    """One client of a run.

    `tolerant` says that links may lose messages, so that conserved quantities are sent as running sums; all peers of
    a run must say the same. `store` makes the peer durable; every exchange with running sums is stored, others each
    `store_every` exchanges. `secret` is the key of its leaves' draws, such as noise for privacy, in place of one that
    follows from `key`, which all peers know; a peer that is restarted must have the same.
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
    ):
        self.client = client
        self.network = network
        self.transport = transport
        self.key = key
        self.tolerant = tolerant
        self.step = step
        self.store, self.store_every = store, store_every
        self._draws = key if secret is None else secret
        self.closed: frozenset[int] = frozenset()  # who is out of the view
        self.counts = Counts()
        self.history: dict[str, list[PyTree]] = {}
        self._places: dict[int, _Place] = {}  # by number on the wire
        self._current: dict[Path, _Place] = {}
        self._past: set[int] = set()  # numbers of places that have started anew
        self._loops: list[tuple[str, int]] = []  # names and rounds of the loops we are in
        self._passes: Counter[Path] = Counter()  # how often the bodies of loops of an agreed length have run
        self._frames: list[Frame] = []  # where we are
        self._saved: list[Frame] = []  # where we have yet to come back to, outermost first
        self._resumed: tuple[dict[str, np.ndarray], dict[str, Any]] | None = None
        self._asked_to_leave = False

    def leave(self) -> None:
        """Leave the run for good at the next exchange of mass, and hand it over; `run` then raises `Left`."""
        if not self.tolerant or not isinstance(self.transport, Members):
            raise InvalidInput("mode", "synchronous", "asynchronous, to leave without stopping the others")
        self._asked_to_leave = True

    @property
    def view(self) -> int:
        """The name of the membership on the wire."""
        return zlib.crc32(repr(sorted(self.closed)).encode()) if self.closed else 0

    @property
    def clock(self) -> int:
        """The step as others see it: every new view starts after all steps of the old."""
        return (len(self.closed) << 32) + self.step

    def run(
        self,
        program: Node,
        state: PyTree,
        data: PyTree,
        record: Mapping[str, Record] | None = None,
        every: int = 1,
        progress: Progress | None = None,
    ) -> PyTree:
        """Walk the program from `state`; the state at its end."""
        check_recording(record or {}, every, program)
        check_repairable(program, self.tolerant)
        program = stepwise(program)
        self._program, self._data = program, data
        self._record, self._every, self._progress = dict(record or {}), every, progress
        self.history = {name: [] for name in self._record}
        with _compiling:  # peers of one process wait for one to trace the program
            found = survey(program, state, data, self.network.clients)
        self._agreement = 1
        if any(loop.until is not None for _, _, loop in found.loops):
            self._agreement = self.network.flood_rounds()
        for sending in found.sendings:
            conserved = isinstance(sending.node, Exchange) and sending.node.conserved
            infinite = isinstance(sending.node, Exchange) and sending.node.reduce == "max"
            self._add(_Place(sending.path, sending.message, conserved and self.tolerant, infinite))
        self._first, self._start = self.step, state
        self._resume(program, state)
        while True:
            try:
                state = self._walk(program, self._start, 0, (), ())
                self._check_finite(state)
                state = self._settle(program, state)
                break
            except NewView:
                self._frames, self._loops = [], []
                self.history = {name: [] for name in self._record}
                self._back_to(self._first)
                for old in [place for place in self._places.values() if place.tolerant]:
                    self._add_again(old, old.epoch)
        self.counts.work = found.total(self._passes)
        return state

    def _add(self, place: _Place) -> None:
        if place.number in self._places:
            raise HyperpushError(f"two places of the program have the same number {place.number} on the wire")
        self._places[place.number] = self._current[place.path] = place

    # ------------------------------------------------------------------- walk

    def _apply(self, f, role: Role, address: tuple[int, ...], round: int, *args: PyTree) -> Any:
        parts = np.asarray(address, np.uint32)
        me, round_ = np.asarray(self.client, np.int32), np.asarray(round, np.int32)
        return _shared(
            f, lambda: _leaf(f, role, args, me, self.network.clients, round_, self._draws, parts, self._data)
        )

    def _walk(self, node: Node, state: PyTree, round: int, address: tuple[int, ...], path: Path) -> PyTree:
        if isinstance(node, Local):
            return self._apply(node.f, Role.LOCAL, address, round, state)
        if isinstance(node, Sequence):
            frame = self._enter(Frame(0))
            for position in range(frame.at, len(node.nodes)):
                frame.at = position
                state = self._walk(node.nodes[position], state, round, (*address, position), (*path, position))
            self._frames.pop()
            return state
        if isinstance(node, Within):
            frame = self._enter(Frame(self.step, outer=state))
            state, depth, loops = frame.outer, len(self._frames), len(self._loops)
            while True:
                try:
                    if self._resumed is None:
                        self._restart(path, address)
                        inner = self._apply(node.enter, Role.ENTER, address, round, state)
                    else:
                        inner = self._shapes(node.enter, state)
                    inner = self._walk(node.body, inner, round, address, (*path, 0))
                    self._wait_for_the_missing(path)
                    break
                except NewView:  # from what the state was before
                    del self._frames[depth:], self._loops[loops:]
                    self._back_to(frame.at)
            self._frames.pop()
            return self._apply(node.leave, Role.LEAVE, address, round, state, inner)
        if isinstance(node, Repeat):
            return self._repeat(node, state, round, address, path)
        if isinstance(node, Exchange):
            return self._exchange(node, state, round, address, path)
        if isinstance(node, Server):
            return self._serve(node, state, round, address, path)
        raise HyperpushError(f"a peer cannot walk {type(node).__name__}")

    def _shapes(self, f: Callable[..., Any], state: PyTree) -> PyTree:
        me, key = jax.ShapeDtypeStruct((), jnp.int32), jax.eval_shape(lambda: jax.random.key(0))

        def call(state, client, round, key, data):
            return f(state, Context(client, self.network.clients, round, key, data))

        return jax.eval_shape(call, state, me, me, key, self._data)

    def _restart(self, path: Path, epoch: Path) -> None:
        """A new state begins below `path`: running sums start anew, and what is still under way for the old is late.

        `epoch` tells one beginning from another, the same at all peers whatever happened to them before.
        """
        for old in [place for place in self._places.values() if place.tolerant and place.path[: len(path)] == path]:
            del self._places[old.number]
            self._past.add(old.number)
            self._add_again(old, epoch)

    def _wait_for_the_missing(self, path: Path) -> None:
        """Before an average ends, who is gone comes back or is closed out: part of its mass would be in it for ever."""
        if not isinstance(self.transport, Members) or not self.tolerant:
            return
        if not any(place.tolerant and place.path[: len(path)] == path for place in self._current.values()):
            return
        while self.transport.missing():
            time.sleep(0.05)
        if self.transport.closed - self.closed:
            raise NewView

    def _add_again(self, old: _Place, epoch: Path) -> None:
        new = _Place(old.path, old.message, True, False, epoch)
        self._past.discard(new.number)
        self._places[new.number] = self._current[new.path] = new

    def _back_to(self, step: int) -> None:
        """What began at `step` begins anew, in the view of those who are left."""
        assert isinstance(self.transport, Members)
        self.closed, self.step = self.transport.closed, step
        self.transport.done(False)

    def _repeat(self, node: Repeat, state: PyTree, round: int, address: tuple[int, ...], path: Path) -> PyTree:
        frame = self._enter(Frame(0, -1))
        if frame.times < 0:
            frame.times = node.at_most
            if node.times is not None:
                frame.times = min(node.at_most, int(self._apply(node.times, Role.TIMES, address, round, state)))
        record, times = self._record.get(node.name), frame.times
        for i in range(frame.at, times):
            frame.at = i
            self._loops.append((node.name, i))
            state = self._walk(node.body, state, i, (*address, i), (*path, 0))
            self._check_finite(state)
            self._loops.pop()
            self._passes[(*path, 0)] += node.agreed
            ended = False
            if node.until is not None:
                content = bool(self._apply(node.until, Role.UNTIL, (*address, i), i, state))
                ended = self._agree(content, path)
            if record is not None and (i + 1) % self._every == 0:
                self.history[node.name].append(self._apply(record, Role.RECORD, (*address, i), i, state))
            if self._progress is not None:
                self._progress(node.name, times if ended else i + 1, times)
            if ended:
                break
        self._frames.pop()
        return state

    def _agree(self, content: bool, path: Path) -> bool:
        objection = np.asarray(not content, np.float32)
        for _ in range(self._agreement):
            _, _, to, heard = self._links("ones")
            self._send(path, objection, np.flatnonzero(to), np.ones(self.network.clients))
            for _, other, _ in self._receive(path, heard):
                objection = np.asarray(np.maximum(objection, other))
            self._tick(path)
        return bool(objection == 0)

    # --------------------------------------------------------------- messages

    def _exchange(self, node: Exchange, state: PyTree, round: int, address: tuple[int, ...], path: Path) -> PyTree:
        place = self._current[path]
        resumed = self._resumed is not None
        if resumed:
            state = self._restore(state)
            place = self._current[path]
        own, weights, to, expected = self._links(node.link_weights)
        targets = np.flatnonzero(to).tolist()
        message = jax.tree.map(np.asarray, self._apply(node.send, Role.SEND, address, round, state))
        if place.tolerant and self._asked_to_leave and not resumed:
            self._hand_mass_over(node, place, state, address, round)
        if place.tolerant:
            if not resumed:  # else the totals hold this exchange's shares already
                flat = np.concatenate([leaf.ravel() for leaf in jax.tree.leaves(message)], dtype=np.float64)
                self._check_finite(flat)
                for target in targets:
                    place.outgoing.add(target, np.float64(weights[target]) * flat)
            self._save(state, True)
            for target in place.outgoing.totals if resumed else targets:
                self._post_total(place, target)
            self._say_farewell()
            heard = self._take_in(path, expected)
            total = place.unravel(place.pending)
            place.pending = np.zeros_like(place.pending)
        else:
            self._save(state, False)
            self._send(path, message, np.flatnonzero(to), weights)
            arrived = self._receive(path, expected)
            heard = np.zeros(self.network.clients, bool)
            heard[[sender for sender, _, _ in arrived]] = True
            if callable(node.weights):
                mine = np.asarray(self._apply(node.weights, Role.WEIGHTS, address, round, state))
                arrived = [(sender, value, float(mine[sender])) for sender, value, _ in arrived]
                own = mine[self.client]
            elif node.weights == "reverse":
                arrived = [(sender, value, float(weights[sender])) for sender, value, _ in arrived]
            total = _combine(message, arrived, node.reduce, self.network.clients)
        self._tick(path)
        inbox = Inbox(total, jnp.asarray(own))
        if node.observe:
            inbox = Inbox(total, jnp.asarray(own), jnp.asarray(heard), jnp.asarray(weights))
        return self._apply(node.receive, Role.RECEIVE, address, round, state, inbox)

    def _serve(self, node: Server, state: PyTree, round: int, address: tuple[int, ...], path: Path) -> PyTree:
        n, message = self.network.clients, self._apply(node.send, Role.SEND, address, round, state)
        message = jax.tree.map(np.asarray, message)
        shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((n, *leaf.shape), leaf.dtype), message)
        key = _compute_key(self.key, np.asarray(address, np.uint32))
        down = (*path, 1)
        others = np.arange(n) != SERVER
        if self.client == SERVER:
            arrived = {sender: value for sender, value, _ in self._all(path, others)}
            everyone = [message if other == SERVER else arrived[other] for other in range(n)]
            answers = node.compute(jax.tree.map(lambda *rows: jnp.stack(rows), *everyone), key)
            answers = jax.tree.map(np.asarray, answers)
            for other in np.flatnonzero(others).tolist():
                self._post(down, other, jax.tree.map(lambda rows, k=other: rows[k], answers), 0, 1.0)
            answer = jax.tree.map(lambda rows: rows[SERVER], answers)
        else:
            self._post(path, SERVER, message, 0, 1.0)
            if down not in self._current:
                if node.host:
                    raise HyperpushError("a server that computes in plain Python runs on simulate and shard only")
                answer_shapes = jax.eval_shape(node.compute, shapes, key)
                one = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape[1:], s.dtype), answer_shapes)
                self._add(_Place(down, one, False, False))
            answer = self._all(down, ~others)[0][1]
        self._tick(path)
        return self._apply(node.receive, Role.RECEIVE, address, round, state, jax.tree.map(jnp.asarray, answer))

    def _links(self, weights: Weights) -> tuple[np.ndarray, ...]:
        step, me = np.asarray(self.step, np.int32), np.asarray(self.client, np.int32)
        found = _shared(type(self.network), lambda: _schedule(self.network, self.key, step, me, weights))
        own, shares, to, heard = (np.asarray(part) for part in found)
        if out := sorted(self.closed | self._leaving):  # what would go to them stays here
            own = np.asarray(own + shares[out].sum(dtype=shares.dtype))
            shares, to, heard = shares.copy(), to.copy(), heard.copy()
            shares[out], to[out], heard[out] = 0, False, False
        return own, shares, to, heard

    def _number(self, path: Path) -> int:
        place = self._current.get(path)
        return place.number if place is not None else _number(path, ())

    def _tick(self, path: Path) -> None:
        self.step += 1
        self.counts.rounds += 1
        self.counts.floats += self._current[path].floats

    def _check_finite(self, tree: PyTree) -> None:
        for leaf in jax.tree.leaves(tree):
            if jnp.issubdtype(leaf.dtype, jnp.inexact) and not np.all(np.isfinite(np.asarray(leaf))):
                name, i = self._loops[-1] if self._loops else (OUTSIDE, 0)
                raise Diverged(name, i + 1, "a smaller step size may help")

    def _send(self, path: Path, message: PyTree, targets: np.ndarray, weights: np.ndarray) -> None:
        if not self._current[path].template.allow_infinite:
            self._check_finite(message)
        for target in targets.tolist():
            self._post(path, target, message, 0, float(weights[target]))

    def _post(self, path: Path, target: int, tree: PyTree, counter: int, weight: float) -> None:
        self._hand_over(target, self._number(path), tree, counter, weight)

    def _post_total(self, place: _Place, target: int, weight: float = 1.0) -> None:
        if target not in self.closed:
            counter = place.outgoing.counters.get(target, 0)
            self._hand_over(target, place.number, place.outgoing.total(target), counter, weight)

    def _acknowledge(self, place: _Place, sender: int) -> None:
        counter = place.incoming.counters.get(sender, 0)
        self._hand_over(sender, place.acknowledges, _ACKNOWLEDGEMENT, counter, 1.0)

    @property
    def _leaving(self) -> frozenset[int]:
        return self.transport.leaving if isinstance(self.transport, Members) else frozenset()

    def _say_farewell(self) -> None:
        """To who leaves: the last totals (of weight LAST_TOTAL), again until it has them."""
        for target in self._leaving - self.closed:
            for place in self._places.values():
                if place.tolerant and place.acknowledged.get(target, -1) < place.outgoing.counters.get(target, 0):
                    self._post_total(place, target, LAST_TOTAL)

    def _hand_over(self, target: int, node: int, tree: PyTree, counter: int, weight: float) -> None:
        header = wire.Header(self.view, node, self.clock, self.client, counter, weight)
        self.transport.send(target, self.clock, wire.encode(header, tree))

    def _collect(self, path: Path, expected: np.ndarray) -> list[tuple[wire.Header, PyTree]]:
        """What has arrived for this exchange; running sums that were late for another are credited there."""
        found, missing = [], np.flatnonzero(expected).tolist()
        while True:
            for header, tree, place in self._arrived(self.clock, missing):
                if place.path == path and header.step == self.clock:
                    found.append((header, tree))
                elif not place.tolerant:
                    self.counts.late += 1
            if not isinstance(self.transport, Members):
                return found
            if self.transport.closed - self.closed:
                raise NewView
            # In step with each other, what did not fit does not stand for the message.
            missing = sorted(set(missing) - {header.sender for header, _ in found})
            if self.tolerant or not missing:
                return found

    def _arrived(self, step: int, expected: list[int]) -> list[tuple[wire.Header, PyTree, _Place]]:
        """What has arrived and fits; running sums are credited to the place that they belong to."""
        found = []
        acknowledging = {place.acknowledges: place for place in self._places.values() if place.tolerant}
        for sender, payload in self.transport.collect(step, expected):
            try:
                node = wire.peek(payload).node
                if node in self._past:
                    self.counts.late += 1
                    continue
                place = self._places.get(node)
                if place is None and node in acknowledging:
                    header, _ = wire.decode(payload, _ACKNOWLEDGE, expect_sender=sender)
                    if header.view == self.view:
                        known = acknowledging[node].acknowledged
                        known[sender] = max(known.get(sender, 0), header.counter)
                    continue
                if place is None:
                    raise wire.Rejected(wire.Reason.WRONG_NODE, f"no place {node} in this program")
                header, tree = wire.decode(payload, place.template, expect_sender=sender)
                if header.view != self.view:
                    raise wire.Rejected(wire.Reason.WRONG_VIEW, f"{header.view} instead of {self.view}")
                if not place.tolerant and not 0 < header.weight <= 1:
                    raise wire.Rejected(wire.Reason.WRONG_WEIGHT, f"{header.weight} is not in (0, 1]")
            except wire.Rejected as rejected:
                self.counts.rejections.add(rejected.reason)
                continue
            if place.tolerant:
                increment = place.incoming.take(sender, header.counter, tree)
                if increment is not None:
                    place.pending = place.pending + increment
                if header.weight == LAST_TOTAL:
                    place.last.add(sender)
                    self._acknowledge(place, sender)
            found.append((header, tree, place))
        return found

    def _take_in(self, path: Path, expected: np.ndarray) -> np.ndarray:
        heard = np.zeros(self.network.clients, bool)
        heard[[header.sender for header, _ in self._collect(path, expected)]] = True
        return heard

    def _receive(self, path: Path, expected: np.ndarray) -> list[tuple[int, PyTree, float]]:
        """(sender, message, weight) of this exchange, each sender once, in the order of senders."""
        first: dict[int, tuple[int, PyTree, float]] = {}
        for header, tree in self._collect(path, expected):
            first.setdefault(header.sender, (header.sender, tree, header.weight))
        return [first[sender] for sender in sorted(first)]

    def _all(self, path: Path, expected: np.ndarray) -> list[tuple[int, PyTree, float]]:
        arrived = self._receive(path, expected)
        missing = set(np.flatnonzero(expected).tolist()) - {sender for sender, _, _ in arrived}
        if missing:
            raise HyperpushError(f"peer {self.client}: no message from {sorted(missing)}; a server needs every message")
        return arrived

    # -------------------------------------------------------------------- end

    def _settle(self, program: Node, state: PyTree) -> PyTree:
        """The end of a run among members: everybody has taken in what was sent to it, and nobody needs anything more.

        What is still on its way at places whose state lives on is taken in as an exchange in which one keeps all.
        """
        if not isinstance(self.transport, Members):
            return state
        if not self.tolerant:
            self.transport.finish()
            return state
        lasting = [place for place in self._places.values() if place.tolerant and not _inside(program, place.path)]
        pause, due, told = RESEND, 0.0, False
        while True:
            owed = {
                (place.number, header.sender) for header, _, place in self._arrived(LAST, []) if place.tolerant
            }  # who sends again has not heard that we have it
            if due == 0.0:
                owed = {(place.number, sender) for place in lasting for sender in place.incoming.counters}
            if self.transport.closed - self.closed:
                if lasting:
                    raise NewView
                self.closed, told = self.transport.closed, False
            for number, sender in owed:
                place = self._places[number]
                if sender not in self.closed:
                    self._acknowledge(place, sender)
            open_links = [
                (place, target)
                for place in lasting
                for target, counter in place.outgoing.counters.items()
                if target not in self.closed | self._leaving and place.acknowledged.get(target, 0) < counter
            ]
            self._say_farewell()
            if time.monotonic() >= due:
                for place, target in open_links:
                    self._post_total(place, target)
                due, pause = time.monotonic() + pause, min(2 * pause, 1.0)
            if not open_links and not told:
                self.transport.done()
                told = True
            if told and self.transport.everyone_done():
                break
            time.sleep(0.01)
        for place in lasting:
            if np.any(place.pending):
                state = self._take_late(program, place, state)
        return state

    def _hand_mass_over(
        self, node: Exchange, place: _Place, state: PyTree, address: tuple[int, ...], round: int
    ) -> None:
        """Take in what is still on its way, push all of it to one neighbour, and be gone."""
        members = self.transport
        assert isinstance(members, Members)
        members.leave(False)
        others = [other for other in range(self.network.clients) if other != self.client]

        def until(ready: Callable[[], bool], again: Callable[[], None]) -> None:
            while not ready():
                again()
                self._arrived(LAST, [])
                if members.closed - self.closed:
                    raise NewView
                time.sleep(0.02)

        def heard() -> bool:
            here = set(members.present(others)) - self._leaving
            return here <= place.last

        until(heard, lambda: None)
        inbox = Inbox(place.unravel(place.pending), jnp.ones(()))
        if node.observe:
            nobody = jnp.zeros(self.network.clients)
            inbox = Inbox(inbox.total, inbox.own, nobody.astype(bool), nobody)
        state = self._apply(node.receive, Role.RECEIVE, (*address, LATE), round, state, inbox)
        message = self._apply(node.send, Role.SEND, address, round, state)
        flat = np.concatenate([np.ravel(np.asarray(leaf)) for leaf in jax.tree.leaves(message)], dtype=np.float64)
        heirs = sorted(set(members.present(others)) - self._leaving)
        if not heirs:
            raise HyperpushError(f"peer {self.client}: nobody is there to hand its mass to")
        place.pending = np.zeros_like(place.pending)
        place.outgoing.add(heirs[0], flat)
        self._save(jax.tree.map(jnp.zeros_like, state), True)

        def open_links() -> list[int]:
            return [
                target
                for target in members.present(list(place.outgoing.counters))
                if place.acknowledged.get(target, 0) < place.outgoing.counters[target]
            ]

        def resend() -> None:
            for target in open_links():
                self._post_total(place, target, LAST_TOTAL)

        until(lambda: not open_links(), resend)
        members.leave(True)
        raise Left(f"peer {self.client} has left and handed its mass to {heirs[0]}")

    def _take_late(self, program: Node, place: _Place, state: PyTree) -> PyTree:
        node = _at(program, place.path)
        nobody = jnp.zeros(self.network.clients)
        inbox = Inbox(place.unravel(place.pending), jnp.ones(()))
        if node.observe:
            inbox = Inbox(inbox.total, inbox.own, nobody.astype(bool), nobody)
        place.pending = np.zeros_like(place.pending)
        return self._apply(node.receive, Role.RECEIVE, (*place.path, LATE), 0, state, inbox)

    # ---------------------------------------------------------------- durable

    def _enter(self, fresh: Frame) -> Frame:
        """Go into a node: for the first time, or to where we were when it was stored."""
        frame = self._saved.pop(0) if self._saved else fresh
        self._frames.append(frame)
        return frame

    def _save(self, state: PyTree, always: bool) -> None:
        """Make durable that this exchange is about to be sent."""
        if self._resumed is not None:  # it is what we come from
            self._resumed = None
            return
        if self.store is None or not (always or (self.step - self._first) % self.store_every == 0):
            return
        arrays: dict[str, np.ndarray] = {}

        def put(name: str, tree: PyTree) -> None:
            for place, leaf in enumerate(jax.tree.leaves(tree)):
                arrays[f"{name}/{place}"] = np.asarray(jax.random.key_data(leaf) if is_key(leaf) else leaf)

        put("state", state)
        for depth, frame in enumerate(self._frames):
            put(f"frame{depth}", frame.outer)
        for name, rows in self.history.items():
            for number, row_ in enumerate(rows):
                put(f"history/{name}/{number}", row_)
        places = []
        for place in self._places.values():
            if not place.tolerant:
                continue
            number = len(places)
            arrays[f"place{number}/pending"] = place.pending
            for way, sums in (("out", place.outgoing), ("in", place.incoming)):
                for other, total in sums.totals.items():
                    arrays[f"place{number}/{way}/{other}"] = total
            places.append(
                {
                    "path": place.path,
                    "epoch": place.epoch,
                    "out": place.outgoing.counters,
                    "in": place.incoming.counters,
                }
            )
        facts = {
            "first": self._first,
            "step": self.step,
            "closed": sorted(self.closed),
            "frames": [(frame.at, frame.times, frame.outer is not None) for frame in self._frames],
            "places": places,
            "history": {name: len(rows) for name, rows in self.history.items()},
            "passes": [(path, times) for path, times in self._passes.items()],
            "loops": self._loops,
            "counts": [self.counts.rounds, self.counts.floats, self.counts.late],
        }
        self.store.save(arrays, facts)
        if isinstance(self.transport, Members):
            self.transport.acknowledge(self.clock)

    def _resume(self, program: Node, state: PyTree) -> None:
        """Prepare to go on from what the store holds, if anything."""
        found = None if self.store is None else self.store.load()
        if found is None:
            return
        arrays, facts = found
        node, outer = program, state
        for depth, (at, times, within) in enumerate(facts["frames"]):
            if isinstance(node, Within) != within or not isinstance(node, Sequence | Repeat | Within):
                raise HyperpushError("the checkpoint is of another program")
            if isinstance(node, Within):
                outer = self._like(f"frame{depth}", outer, arrays)
                self._saved.append(Frame(at, times, outer))
                outer = self._shapes(node.enter, outer)
            else:
                self._saved.append(Frame(at, times))
            node = children(node)[at if isinstance(node, Sequence) else 0]
        if not isinstance(node, Exchange):
            raise HyperpushError("the checkpoint is of another program")
        self._resumed = arrays, facts
        self.step, self._first, self.closed = facts["step"], facts["first"], frozenset(facts["closed"])
        self._passes = Counter({tuple(path): times for path, times in facts["passes"]})
        self._loops = []
        self.counts.rounds, self.counts.floats, self.counts.late = facts["counts"]

    def _restore(self, state: PyTree) -> PyTree:
        """The state, totals and records of the exchange that was stored."""
        assert self._resumed is not None
        arrays, facts = self._resumed
        for number, saved in enumerate(facts["places"]):
            path, epoch = tuple(saved["path"]), tuple(saved["epoch"])
            old = self._current[path]
            del self._places[old.number]
            place = _Place(path, old.message, True, False, epoch)
            place.pending = arrays[f"place{number}/pending"]
            for way, sums in (("out", place.outgoing), ("in", place.incoming)):
                sums.counters = {int(other): counter for other, counter in saved[way].items()}
                sums.totals = {other: arrays[f"place{number}/{way}/{other}"] for other in sums.counters}
            self._places[place.number] = self._current[path] = place
        for name, rows in facts["history"].items():
            if rows and name in self._record:
                like = self._shapes(self._record[name], self._recorded_state(name))
                self.history[name] = [self._like(f"history/{name}/{k}", like, arrays) for k in range(rows)]
        return self._like("state", state, arrays)

    def _recorded_state(self, name: str) -> PyTree:
        """The shapes of what the loop `name` runs on."""
        node, state = self._program, self._start
        stack: list[tuple[Node, PyTree]] = [(node, state)]
        while stack:
            node, state = stack.pop()
            if isinstance(node, Repeat) and node.name == name:
                return state
            inner = self._shapes(node.enter, state) if isinstance(node, Within) else state
            stack += [(child, inner) for child in children(node)]
        raise HyperpushError(f"the checkpoint holds records of {name!r}, which is not in this program")

    @staticmethod
    def _like(name: str, like: PyTree, arrays: Mapping[str, np.ndarray]) -> PyTree:
        """Stored arrays as a tree like `like`."""
        leaves, structure = jax.tree.flatten(like)

        def read(place: int, leaf: Any) -> Any:
            array = arrays.get(f"{name}/{place}")
            shape = jax.eval_shape(jax.random.key_data, leaf).shape if is_key(leaf) else leaf.shape
            if array is None or array.shape != shape or (not is_key(leaf) and array.dtype != leaf.dtype):
                raise HyperpushError(f"the checkpoint does not fit this program: {name}/{place}")
            return jax.random.wrap_key_data(jnp.asarray(array)) if is_key(leaf) else jnp.asarray(array)

        return structure.unflatten([read(place, leaf) for place, leaf in enumerate(leaves)])


LATE = (1 << 31) - 1  # part of the key of what takes in late mass: no loop gets there


def _at(program: Node, path: Path) -> Any:
    for place in path:
        program = children(program)[place if isinstance(program, Sequence) else 0]
    return program


def _inside(program: Node, path: Path) -> bool:
    """Whether the place is inside a `Within`, whose state ends with it."""
    return any(isinstance(_at(program, path[:depth]), Within) for depth in range(len(path)))


def check_conserved(program: Node) -> None:
    """Refuse, where every peer goes at its own pace, programs whose messages must come in time."""
    check_repairable(program, True)
    if contains(program, lambda node: isinstance(node, Exchange) and not node.conserved):
        raise InvalidInput(
            "mode", "asynchronous", "synchronous: this program has messages that cannot come late (not conserved)"
        )


def _combine(like: PyTree, arrived: list[tuple[int, PyTree, float]], reduce: str, clients: int) -> PyTree:
    """What an inbox holds: the weighted sum, the maximum, or the stack of the others' messages."""

    def total(leaf, *others):
        if reduce == "max":
            return jnp.asarray(np.max([np.full_like(leaf, lowest(leaf.dtype)), *others], axis=0))
        if reduce == "stack":
            rows = np.zeros((clients, *np.shape(leaf)), np.asarray(leaf).dtype)
            for (sender, _, _), other in zip(arrived, others, strict=True):
                rows[sender] = other
            return jnp.asarray(rows)
        wide = np.zeros(leaf.shape, np.float64)
        for (_, _, weight), other in zip(arrived, others, strict=True):
            wide += weight * np.asarray(other, np.float64)
        return jnp.asarray(wide, leaf.dtype if jnp.issubdtype(leaf.dtype, jnp.inexact) else jnp.result_type(float))

    return jax.tree.map(total, like, *(value for _, value, _ in arrived))


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
    first = peers[0].counts
    return Outcome(
        states=stack(results),
        step=peers[0].step,
        rounds=first.rounds,
        floats=first.floats,
        hessian_products=first.work["hessian_products"],
        jacobian_products=first.work["jacobian_products"],
        gradients=first.work["gradients"],
        history=history,
        late=sum(peer.counts.late for peer in peers),
        rejected=dict(rejected),
    )


def row(leaf: Any, client: int) -> Any:
    """One client's part of a stacked array. NumPy takes it without compiling anything, but does not know keys."""
    return leaf[client] if is_key(leaf) else jnp.asarray(np.asarray(leaf)[client])


def stacked(rows: Any, axis: int) -> Any:
    """Rows stacked, by NumPy where it can."""
    return jnp.stack(rows, axis) if is_key(rows[0]) else jnp.asarray(np.stack(rows, axis))


def is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
