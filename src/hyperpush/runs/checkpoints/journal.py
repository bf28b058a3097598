"""Journal of a run: a hook of compiled engines that saves their results and states in checkpoints.

A run of an experiment consists of pieces: each call of a compiled engine is one piece. The journal saves the result of
a finished piece. Of an unfinished piece it saves the state between two compiled chunks. A resumed run reads the results
of finished pieces and continues the unfinished piece from its state. It repeats all other work, with the same numbers.
"""

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from types import FrameType
from typing import Any, NamedTuple, final

import jax
import numpy as np
from jaxtyping import PyTree

from hyperpush.base import processes
from hyperpush.base.errors import HyperpushError
from hyperpush.base.signals import in_collector, stop_signals
from hyperpush.engines.base import ambient, surround
from hyperpush.engines.compiled.hostloop import HostLoop
from hyperpush.engines.hooks import Cursor, Hook, Replay, Snapshot
from hyperpush.engines.keys import as_bits
from hyperpush.runs.checkpoints import Policy
from hyperpush.runs.checkpoints.store import CheckpointFolder, ClientRows, Kind, Saved

_BUFFERED = 1 << 28  # largest size in bytes of finished results that wait in memory for the next checkpoint
_AXES = {"rows": 0, "history": 1}  # client axis of the arrays of a snapshot, by the first word of their names


class _Piece(NamedTuple):
    """One call of a compiled engine in the run."""

    number: int  # counted from 0 in the order of the calls
    digest: str  # identity of the computation and its data (`digest_of`)
    finished: bool  # True if the result was on disk when this process started


class _Entry(NamedTuple):
    """The result or the state of a piece, as a checkpoint holds it."""

    piece: _Piece
    snapshot: Snapshot

    def arrays(self) -> dict[str, ClientRows]:
        number, count = self.piece.number, self.snapshot.clients
        axes = {name: _AXES.get(name.split()[0]) for name in self.snapshot.arrays}
        return {f"{number} {name}": ClientRows(each, axes[name], count) for name, each in self.snapshot.arrays.items()}

    def facts(self) -> dict[str, Any]:
        about = self.snapshot._replace(arrays={})._asdict()
        return {**about, "piece": self.piece.number, "digest": self.piece.digest}


@final
class Journal(Hook):
    """Hook that writes the checkpoints of one run of an experiment, and continues an interrupted run from them."""

    def __init__(self, store: CheckpointFolder, policy: Policy):
        self.store = store
        self.policy = policy
        self.rounds = 0  # communication rounds since the last checkpoint
        self.asked: int | None = None  # the signal that asked this process to stop
        self.busy = False  # True while a piece runs: a signal then waits for the end of the chunk, where state is saved
        self._latest: Callable[[], _Entry | None] = lambda: None
        self._pending: list[_Entry] = []
        self._open: list[_Piece] = []  # unfinished pieces; the last is the innermost
        self._begun = 0
        self._saved_at = time.monotonic()
        self._found = sorted(store.find(), key=lambda saved: saved.kind)  # results first; then states, newest first
        self._states = [saved for saved in self._found if saved.kind == "state"]

    # ------------------------------------------------------------------------- methods of a hook

    def resume_from(self, run: HostLoop) -> Snapshot | None:
        """Return the snapshot of the next piece if the interrupted run has saved its result or state, else None."""
        if self.asked is not None and processes.count() == 1:  # a signal arrived that could not end the run at once
            self._leave()
        number, self._begun, self.busy = self._begun, self._begun + 1, True
        digest, own = digest_of(run), f"{number} "
        entries = ((saved, entry) for saved in self._found for entry in saved.facts["entries"])
        saved, entry = next((pair for pair in entries if pair[1]["piece"] == number), (None, None))
        self._open.append(_Piece(number, digest, saved is not None and saved.kind == "result"))
        if saved is None or entry is None:
            return None
        _check_same(saved.number, entry["digest"], digest)
        arrays = {name.removeprefix(own): each for name, each in saved.load().items() if name.startswith(own)}
        trail = tuple((tuple(path), done) for path, done in entry["trail"])
        return Snapshot(trail, arrays, entry["clients"], entry["extra"])

    def end_chunk(self, done: int, stop: int) -> int:
        most = self.policy.rounds
        return stop if most is None else min(stop, done + max(1, most - self.rounds))

    def between_chunks(self, cursor: Cursor, snapshot: Callable[[], Snapshot | None]) -> None:
        piece, self.rounds = self._open[-1], self.rounds + cursor.rounds

        def latest() -> _Entry | None:
            found = snapshot()
            return None if found is None else _Entry(piece, found)

        self._latest = latest
        self._pause()

    def find_divergence(self, cursor: Cursor, replay: Replay | None) -> None:
        self.busy, self._latest = False, lambda: None

    def keep_result(self, run: HostLoop, snapshot: Callable[[], Snapshot | None]) -> None:
        piece, self._latest = self._open.pop(), lambda: None
        # A piece without a snapshot, such as that of a server in plain Python, is computed again in a resumed run.
        if not piece.finished and (found := snapshot()) is not None:
            self._pending.append(_Entry(piece, found))
        self._pause()
        self.busy = bool(self._open)

    # ------------------------------------------------------------------------- writing checkpoints

    def _pause(self) -> None:
        """Write a checkpoint if one is due, and end the process if a signal has arrived."""
        minutes, rounds = self.policy.minutes, self.policy.rounds
        waiting = sum(leaf.nbytes for entry in self._pending for leaf in entry.snapshot.arrays.values())
        late = minutes is not None and time.monotonic() - self._saved_at >= 60 * minutes
        due = late or (rounds is not None and self.rounds >= rounds) or waiting > _BUFFERED
        due, stop = processes.agree(due, self.asked is not None)
        if due or stop:
            self.save()
        if stop or (self.asked is not None and processes.count() == 1):  # a signal may have arrived during the writing
            self._leave()

    def save(self) -> None:
        """Write the finished results and the latest state; signals wait until both are on disk."""
        before, self.busy = self.busy, True
        try:
            if self._pending:
                self._write("result", self._pending)
                self._pending = []
            if (latest := self._latest()) is not None:
                self._states.insert(0, self._write("state", [latest]))
                for old in self._states[self.policy.keep :]:
                    old.remove()
                del self._states[self.policy.keep :]
            self._latest = lambda: None
        finally:
            self.busy = before
        self.rounds, self._saved_at = 0, time.monotonic()

    def _write(self, kind: Kind, entries: Sequence[_Entry]) -> Saved:
        arrays = {name: rows for entry in entries for name, rows in entry.arrays().items()}
        return self.store.save(kind, arrays, {"entries": [entry.facts() for entry in entries]})

    # ------------------------------------------------------------------------- signals

    def _leave(self) -> None:
        """End the process as the received signal requests."""
        self.busy = False
        # `asked` stays set, because Python drops errors that are raised in callbacks of the garbage collector.
        if self.asked == signal.SIGINT:
            raise KeyboardInterrupt
        sys.exit(128 + (self.asked or 0))

    @contextmanager
    def active(self, *others: Hook) -> Iterator[None]:
        """Attach this journal and other hooks to all runs of compiled engines in the block, and handle stop signals."""
        handlers = {}
        if threading.current_thread() is threading.main_thread():
            handlers = {number: signal.signal(number, self._ask) for number in stop_signals()}
        try:
            with surround(ambient().engine, (*others, self)):
                yield
        finally:
            self.busy = False
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        again, self.asked = self.asked is not None, number
        # A process with an unfinished piece, or one of several processes, stops at the end of a chunk. A second signal
        # stops it at once.
        if (again or not (self.busy or processes.count() > 1)) and not in_collector(frame):
            self._leave()


def digest_of(run: HostLoop) -> str:
    """Return the identity of a piece: a digest of its program and shapes, and a digest of all clients' data."""
    start, context, found = run.structure.start, run.context, run.profile
    loops = [(loop.name, loop.at_most) for _, _, loop in found.loops]
    nodes = [(sending.path, type(sending.node).__name__) for sending in found.sendings]
    shapes = [f"{leaf.shape[1:]}{leaf.dtype}" for leaf in jax.tree.leaves((start.states, context.data))]
    network = (context.network.name, context.network.clients)
    key = np.asarray(jax.random.key_data(processes.gather(run.key))).tolist()
    kinds = sorted({device.device_kind for device in jax.devices()})
    parts = (loops, nodes, shapes, network, run.every, sorted(run.recorders), key, jax.__version__, kinds)
    about = blake2b(repr(parts).encode(), digest_size=8).hexdigest()
    return f"{about}-{values_digest(context.data, context.network.clients)}"


def values_digest(tree: PyTree, clients: int) -> str:
    """Return a digest of the bytes of all clients' rows, which does not depend on the number of processes."""
    own = everywhere = 0
    for place, leaf in enumerate(jax.tree.leaves(tree)):
        bits = as_bits(leaf)
        if processes.spread(bits):
            own += _sum_of_rows(place, processes.own_clients(bits), clients)
        else:
            everywhere += _sum_of_rows(place, enumerate(np.asarray(bits)), clients)
    return f"{(everywhere + sum(map(int, processes.gather_texts(str(own))))) % 2**64:016x}"


def _sum_of_rows(place: int, rows: Iterable[tuple[int, Any]], clients: int) -> int:
    # Digests of rows are summed, so that each process can add up its own clients. Rows after the last client are
    # padding.
    total = 0
    for client, row in rows:
        if client < clients:
            key = f"{place} {client} {row.dtype}{row.shape}".encode()
            found = blake2b(np.ascontiguousarray(row).tobytes(), digest_size=8, key=key[:64])
            total += int.from_bytes(found.digest())
    return total


def _check_same(number: int, kept: str, now: str) -> None:
    """Raise HyperpushError if a checkpoint belongs to another computation."""
    if kept == now:
        return
    if kept.partition("-")[0] == now.partition("-")[0]:
        cause = "was computed from other data: the values that clients hold have changed"
    else:
        cause = (
            "is of another computation: the code, the configuration, the shapes of the data or the type of device "
            "have changed"
        )
    raise HyperpushError(f"checkpoint {number} {cause} since; start anew")
