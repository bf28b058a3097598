"""One client per process or thread: it walks the program around its own jitted leaves and talks through a transport.

Everything that arrives is bytes from outside: it is decoded and checked before it touches the state, and what does not
fit is counted and dropped. On links that lose messages, conserved quantities travel as running sums per link.
"""

import threading
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

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
from hyperpush.errors import Diverged, HyperpushError
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

    def __init__(self, path: Path, message: PyTree, tolerant: bool, infinite: bool, epoch: int = 0):
        self.path, self.message, self.tolerant, self.epoch = path, message, tolerant, epoch
        self.number = zlib.crc32(repr((path, epoch)).encode())  # its name on the wire
        example = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), message)
        self.floats = sum(leaf.size for leaf in jax.tree.leaves(example))
        self.template = wire.Template(np.zeros(self.floats) if tolerant else example, infinite)
        self.outgoing, self.incoming = Outgoing(self.floats), Incoming(self.floats)
        self.pending = np.zeros(self.floats)  # taken in since the last exchange here

    def unravel(self, flat: np.ndarray) -> PyTree:
        """A flat vector in the shapes and types of the message."""
        leaves, structure = jax.tree.flatten(self.message)
        parts = np.split(flat, np.cumsum([leaf.size for leaf in leaves])[:-1])
        shaped = [part.reshape(leaf.shape).astype(leaf.dtype) for part, leaf in zip(parts, leaves, strict=True)]
        return structure.unflatten([jnp.asarray(part) for part in shaped])


class Peer:
    """One client of a run.

    `tolerant` says that links may lose messages, so that conserved quantities are sent as running sums; all peers of
    a run must say the same.
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
        view: int = 0,
    ):
        self.client = client
        self.network = network
        self.transport = transport
        self.key = key
        self.tolerant = tolerant
        self.step = step
        self.view = view
        self.counts = Counts()
        self.history: dict[str, list[PyTree]] = {}
        self._places: dict[int, _Place] = {}  # by number on the wire
        self._current: dict[Path, _Place] = {}
        self._past: set[int] = set()  # numbers of places that have started anew
        self._loops: list[tuple[str, int]] = []  # names and rounds of the loops we are in
        self._passes: Counter[Path] = Counter()  # how often the bodies of loops of an agreed length have run

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
        self._data = data
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
        state = self._walk(program, state, 0, (), ())
        self._check_finite(state)
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
        return _shared(f, lambda: _leaf(f, role, args, me, self.network.clients, round_, self.key, parts, self._data))

    def _walk(self, node: Node, state: PyTree, round: int, address: tuple[int, ...], path: Path) -> PyTree:
        if isinstance(node, Local):
            return self._apply(node.f, Role.LOCAL, address, round, state)
        if isinstance(node, Sequence):
            for position, child in enumerate(node.nodes):
                state = self._walk(child, state, round, (*address, position), (*path, position))
            return state
        if isinstance(node, Within):
            self._restart(path)
            inner = self._apply(node.enter, Role.ENTER, address, round, state)
            inner = self._walk(node.body, inner, round, address, (*path, 0))
            return self._apply(node.leave, Role.LEAVE, address, round, state, inner)
        if isinstance(node, Repeat):
            return self._repeat(node, state, round, address, path)
        if isinstance(node, Exchange):
            return self._exchange(node, state, round, address, path)
        if isinstance(node, Server):
            return self._serve(node, state, round, address, path)
        raise HyperpushError(f"a peer cannot walk {type(node).__name__}")

    def _restart(self, path: Path) -> None:
        """A new state begins below `path`: running sums start anew, and what is still under way for the old is late."""
        for old in [place for place in self._places.values() if place.tolerant and place.path[: len(path)] == path]:
            del self._places[old.number]
            self._past.add(old.number)
            new = _Place(old.path, old.message, True, False, old.epoch + 1)
            self._places[new.number] = self._current[new.path] = new

    def _repeat(self, node: Repeat, state: PyTree, round: int, address: tuple[int, ...], path: Path) -> PyTree:
        times = node.at_most
        if node.times is not None:
            times = min(times, int(self._apply(node.times, Role.TIMES, address, round, state)))
        record = self._record.get(node.name)
        for i in range(times):
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
        message = jax.tree.map(np.asarray, self._apply(node.send, Role.SEND, address, round, state))
        own, weights, to, expected = self._links(node.link_weights)
        if place.tolerant:
            flat = np.concatenate([leaf.ravel() for leaf in jax.tree.leaves(message)], dtype=np.float64)
            self._check_finite(flat)
            for target in np.flatnonzero(to).tolist():
                counter, total = place.outgoing.add(target, np.float64(weights[target]) * flat)
                self._post(path, target, total, counter, 1.0)
            heard = self._take_in(path, expected)
            total = place.unravel(place.pending)
            place.pending = np.zeros_like(place.pending)
        else:
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
            total = _combine(message, arrived, node.reduce)
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
        return tuple(np.asarray(part) for part in found)

    def _number(self, path: Path) -> int:
        place = self._current.get(path)
        return place.number if place is not None else zlib.crc32(repr((path, 0)).encode())

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
        header = wire.Header(self.view, self._number(path), self.step, self.client, counter, weight)
        self.transport.send(target, self.step, wire.encode(header, tree))

    def _collect(self, path: Path, expected: np.ndarray) -> list[tuple[wire.Header, PyTree]]:
        """What has arrived for this exchange; running sums that were late for another are credited there."""
        here, found = self._number(path), []
        for sender, payload in self.transport.collect(self.step, np.flatnonzero(expected).tolist()):
            try:
                node = wire.peek(payload).node
                if node in self._past:
                    self.counts.late += 1
                    continue
                place = self._places.get(node)
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
            if node == here and header.step == self.step:
                found.append((header, tree))
            elif not place.tolerant:
                self.counts.late += 1
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


def _combine(like: PyTree, arrived: list[tuple[int, PyTree, float]], reduce: str) -> PyTree:
    """What an inbox holds: the weighted sum, or the maximum, of the others' messages."""

    def total(leaf, *others):
        if reduce == "max":
            return jnp.asarray(np.max([np.full_like(leaf, lowest(leaf.dtype)), *others], axis=0))
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
