"""What of a run is kept, and when.

A run is a sequence of pieces: each call of a compiled engine is one. Finished pieces keep their result, the piece under
way its state between two compiled chunks. A run that is started again does everything else anew, which gives the same
numbers, reads finished pieces back, and goes on with the one that was cut off.
"""

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, final

import jax
import numpy as np

from hyperpush import processes
from hyperpush.errors import HyperpushError
from hyperpush.runs.checkpoints import Policy
from hyperpush.runs.checkpoints.store import Like, Saved, Store

Trail = tuple[tuple[tuple[int, ...], int], ...]  # the loops that the host is in: their paths, and the iterations done

_BUFFERED = 1 << 28  # bytes of finished results that wait in memory for the next checkpoint, at most
_IMPLEMENTATIONS = {"key<fry>": "threefry2x32", "key<rbg>": "rbg", "key<urbg>": "unsafe_rbg"}


@dataclass(frozen=True)
class Contents:
    """A state to be kept: arrays in order, and facts that JSON can hold."""

    leaves: Sequence[Any]
    facts: dict[str, Any]


@dataclass
class _Entry:
    """A piece's result or state."""

    piece: int
    digest: str
    contents: Contents
    trail: Trail = ()

    def facts(self) -> dict[str, Any]:
        return {"piece": self.piece, "digest": self.digest, "trail": self.trail, "facts": self.contents.facts}


@dataclass
class Piece:
    """One call of an engine."""

    journal: "Journal"
    number: int
    digest: str
    found: tuple[Saved, int, dict[str, Any]] | None = None  # the checkpoint to go on from, its first array, its facts
    finished: bool = False

    @property
    def trail(self) -> Trail:
        """Where to go on."""
        assert self.found is not None
        return tuple((tuple(path), done) for path, done in self.found[2]["trail"])

    @property
    def facts(self) -> dict[str, Any]:
        """What was kept besides arrays."""
        assert self.found is not None
        return self.found[2]["facts"]

    def shapes(self) -> list[tuple[tuple[int, ...], str]]:
        """Of the arrays that were kept."""
        assert self.found is not None
        saved, first, _ = self.found
        return self.journal.store.shapes(saved)[first:]

    def load(self, like: Sequence[Any], shardings: Sequence[Any]) -> list[Any]:
        """The arrays that were kept, in the order in which they were given."""
        assert self.found is not None
        saved, first, _ = self.found
        targets = []
        for (shape, dtype), leaf, sharding in zip(self.shapes(), like, shardings, strict=False):
            wanted = _bits_like(leaf)
            # The clients, on axis 0 or in a history on axis 1, may have been padded to another number.
            same = len(shape) == len(wanted.shape) and shape[2:] == wanted.shape[2:]
            if dtype != str(wanted.dtype) or not same:
                raise HyperpushError(
                    f"checkpoint {saved.number} holds {dtype}{list(shape)} where this run needs "
                    f"{wanted.dtype}{list(wanted.shape)}: the code or the data have changed since; start anew"
                )
            targets.append(Like(wanted.shape, wanted.dtype, sharding))
        read = self.journal.store.load(saved, range(first, first + len(targets)), targets)
        return [_from_bits(array, leaf) for array, leaf in zip(read, like, strict=True)]

    def room(self, stop: int, done: int) -> int:
        """A chunk's end, if that is not later than the next checkpoint."""
        most = self.journal.policy.rounds
        return stop if most is None else min(stop, done + max(1, most - self.journal.rounds))

    def reached(self, trail: Trail, contents: Callable[[], Contents]) -> None:
        """The run can be cut here: keep it if it is time to, and stop if asked to."""
        self.journal.latest = lambda: _Entry(self.number, self.digest, contents(), trail)
        self.passed()

    def passed(self) -> None:
        """Keep what has been reached if it is time to, and stop if asked to."""
        journal = self.journal
        due = journal.due() or journal.waiting > _BUFFERED
        due, stop = processes.agree(due, journal.asked is not None)
        if due or stop:
            journal.save()
        if stop or (journal.asked is not None and processes.count() == 1):  # or asked while it was written
            journal.leave()

    def finish(self, contents: Contents | None) -> None:
        """The piece is done; without contents it will be done again if the run is cut off."""
        journal = self.journal
        journal.latest = None
        if contents is not None and not self.finished:
            journal.pending.append(_Entry(self.number, self.digest, contents))
            journal.waiting += sum(leaf.nbytes for leaf in contents.leaves)
        self.passed()


@final
class Journal:
    """The checkpoints of one run."""

    def __init__(self, store: Store, policy: Policy, show: Callable[[str, int, int], None] | None = None):
        self.store = store
        self.policy = policy
        self.show = show or (lambda name, done, total: None)
        self.rounds = 0  # since the last checkpoint
        self.latest: Callable[[], _Entry] | None = None
        self.pending: list[_Entry] = []
        self.waiting = 0  # bytes
        self.asked: int | None = None  # the signal to stop
        self.busy = False
        self.moved = 0  # bytes between devices
        self._begun = 0
        self._saved_at = time.monotonic()
        self._checked: dict[int, bool] = {}
        found = store.find()
        self._results = [each for each in found if each.kind == "result"]
        self._states = [each for each in found if each.kind == "state"]

    def begin(self, digest: str) -> Piece:
        """The next piece; `digest` tells whether it is the same as in the run that was cut off."""
        piece = Piece(self, self._begun, digest)
        self._begun += 1
        for saved in (*self._results, *self._states):
            first = 0
            for entry in saved.facts["entries"]:
                if entry["piece"] == piece.number and self._good(saved):
                    _check_same(saved.number, entry["digest"], digest)
                    piece.found, piece.finished = (saved, first, entry), saved.kind == "result"
                    return piece
                first += entry["arrays"]
        return piece

    def due(self) -> bool:
        """Whether it is time for a checkpoint."""
        minutes, rounds = self.policy.minutes, self.policy.rounds
        late = minutes is not None and time.monotonic() - self._saved_at >= 60 * minutes
        return late or (rounds is not None and self.rounds >= rounds)

    def save(self) -> None:
        """Write what has been reached; a signal waits."""
        with self.working():
            if self.pending:
                self._results.append(self._write("result", self.pending))
                self.pending, self.waiting = [], 0
            if self.latest is not None:
                self._states.insert(0, self._write("state", [self.latest()]))
                self.latest = None
                for old in self._states[self.policy.keep :]:
                    self.store.remove(old)
                del self._states[self.policy.keep :]
        self.rounds, self._saved_at = 0, time.monotonic()

    def leave(self) -> None:
        """End as the signal asked for."""
        self.busy = False
        if self.asked == signal.SIGTERM:  # it stays: what is raised in a callback of the garbage collector is lost
            sys.exit(128 + signal.SIGTERM)
        raise KeyboardInterrupt

    @contextmanager
    def working(self) -> Iterator[None]:
        """A signal waits until the end of the block: what is computed there can be kept then."""
        self.busy = True
        try:
            yield
        finally:
            self.busy = False

    @contextmanager
    def active(self) -> Iterator[None]:
        """The journal of everything that engines compute in the block."""
        global _current
        before, _current = _current, self
        handlers = {}
        if threading.current_thread() is threading.main_thread():
            handlers = {number: signal.signal(number, self._asked) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            _current = before
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def _asked(self, number: int, frame: Any) -> None:
        again, self.asked = self.asked is not None, number
        # Processes stop together, at the end of a chunk, and so does one that a chunk keeps busy; twice means at once.
        if again or not (self.busy or processes.count() > 1):
            self.leave()

    def _write(self, kind: Any, entries: Sequence[_Entry]) -> Saved:
        leaves = [_bits(leaf) for entry in entries for leaf in entry.contents.leaves]
        facts = [{**entry.facts(), "arrays": len(entry.contents.leaves)} for entry in entries]
        return self.store.save(kind, leaves, {"entries": facts})

    def _good(self, saved: Saved) -> bool:
        if saved.number not in self._checked:
            self._checked[saved.number] = self.store.whole(saved)
            if not self._checked[saved.number]:
                for kept in (self._results, self._states):
                    kept[:] = [each for each in kept if each.number != saved.number]
        return self._checked[saved.number]


_current: Journal | None = None


def current() -> Journal | None:
    """The journal of the run under way, if it keeps one."""
    return _current


def digest_of(data: Any, clients: int, *parts: Any) -> str:
    """Short digests of texts and numbers, and of the values of every client's data."""
    kinds = sorted({device.device_kind for device in jax.devices()})
    about = blake2b(repr((parts, jax.__version__, kinds)).encode(), digest_size=8).hexdigest()
    return f"{about}-{values_digest(data, clients)}"


def values_digest(tree: Any, clients: int) -> str:
    """A digest of the bytes of all clients' rows, the same on any number of processes."""
    spread = everywhere = 0
    for place, leaf in enumerate(jax.tree.leaves(tree)):
        bits = _bits(leaf)
        if processes.spread(bits):
            spread += _sum_of_rows(place, processes.own_clients(bits), clients)
        else:
            everywhere += _sum_of_rows(place, enumerate(np.asarray(bits)), clients)
    return f"{(everywhere + processes.added(spread % 2**64)) % 2**64:016x}"


def _sum_of_rows(place: int, rows: Iterable[tuple[int, Any]], clients: int) -> int:
    # A sum, so that each process can add up its own clients' rows; those beyond the last client are padding.
    total = 0
    for client, row in rows:
        if client < clients:
            key = f"{place} {client} {row.dtype}{row.shape}".encode()
            found = blake2b(np.ascontiguousarray(row).tobytes(), digest_size=8, key=key[:64])
            total += int.from_bytes(found.digest())
    return total


def _check_same(number: int, kept: str, now: str) -> None:
    """Refuse to go on from a checkpoint of another computation."""
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


def _bits(leaf: Any) -> Any:
    """A random key as the integers it is made of; any other array as it is."""
    if jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(leaf)
    return leaf


def _bits_like(leaf: Any) -> Any:
    if jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        name = _IMPLEMENTATIONS[str(leaf.dtype)]
        one = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0, impl=name)))
        return jax.ShapeDtypeStruct((*leaf.shape, *one.shape), one.dtype)
    return leaf


def _from_bits(array: Any, leaf: Any) -> Any:
    if jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(array, impl=_IMPLEMENTATIONS[str(leaf.dtype)])
    return array
