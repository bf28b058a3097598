"""Members on a network in memory, without sockets or clocks; the test decides which member dies, and when."""

import threading
import time
from collections.abc import Callable

import jax
import numpy as np

from hyperpush.base.errors import HyperpushError
from hyperpush.engines.peer import Peer
from hyperpush.engines.peer.checkpoint import decode, encode
from hyperpush.engines.transport import wire

_EMPTY = len(wire.encode(wire.Header(0, 0, 0, 0), np.zeros(0)))


def numbers(payload):
    """Return the number of float64 values in a total besides its mass; 0 for an acknowledgment."""
    return max((len(payload) - _EMPTY) // 8 - 1, 0)


class Kept:
    """Checkpoint store in memory."""

    def __init__(self):
        self.kept = None

    def save(self, facts):
        text, arrays = encode(facts)
        self.kept = text, {name: array.copy() for name, array in arrays.items()}

    def load(self):
        return None if self.kept is None else decode(*self.kept)


class Hall:
    """Network in memory: the members' states and mail; a share `loss` of the mail is lost."""

    def __init__(self, clients, loss=0.0, patience=60.0, close_after=None, seed=0):
        self.clients, self.loss, self.patience, self.close_after = clients, loss, patience, close_after
        self.lock = threading.Condition()
        self.random = np.random.default_rng(seed)
        self.mail = {client: [] for client in range(clients)}
        self.alive, self.lost = dict.fromkeys(range(clients), True), {}
        self.done = {}  # members that are done, with the view in which they said so
        self.closed, self.leaving, self.left = frozenset(), frozenset(), frozenset()
        self.drops: Callable[..., bool] = lambda payload, seat: False  # further messages to lose

    def die(self, client):
        with self.lock:
            self.alive[client], self.mail[client] = False, []
            self.lost[client] = time.monotonic()
            self.lock.notify_all()

    def back(self, client):
        with self.lock:
            self.alive[client], self.mail[client] = True, []
            self.done.pop(client, None)
            self.lock.notify_all()


class Seat:
    """One member's transport; the member dies at a message for which `dies(payload, transport)` is true.

    A member learns the others' announcements only when it reads its mail or asks who is missing. Until then members
    may
    disagree about them.
    """

    def __init__(self, hall, client, dies=None):
        self.hall, self.client, self.dies = hall, client, dies
        self.patience, self.to, self.finished = hall.patience, -1, False
        self.closed = frozenset()
        self.hear()

    def hear(self):
        with self.hall.lock:
            hall, own = self.hall, {self.client}
            self.closed, self.leaving, self.left = self.closed | hall.closed, hall.leaving - own, hall.left - own
            self.said = {each: view for each, view in hall.done.items() if each != self.client}
            self._close_out()

    @property
    def settled(self):
        return self.left.union(each for each, view in self.said.items() if view == self.closed)

    def send(self, to, step, payload):
        self.to = to
        if self.dies is not None and self.dies(payload, self):
            self.hall.die(self.client)
            raise ConnectionAbortedError
        with self.hall.lock:
            if self.hall.drops(payload, self):
                return
            if self.hall.alive[to] and self.hall.random.random() >= self.hall.loss:
                self.hall.mail[to].append((self.client, bytes(payload)))
                self.hall.lock.notify_all()

    def collect(self, step, expected):
        with self.hall.lock:
            self.hear()
            if len(expected) and not self.hall.mail[self.client]:
                self.hall.lock.wait(0.002)
            found, self.hall.mail[self.client] = self.hall.mail[self.client], []
        return found

    def _close_out(self):
        hall, now = self.hall, time.monotonic()
        if hall.close_after is not None:
            gone = {each for each, when in hall.lost.items() if not hall.alive[each] and now - when > hall.close_after}
            gone -= self._out()
            self.closed, hall.closed = self.closed | gone, hall.closed | gone

    def _out(self):
        """Return the members that may be gone for good; members that are done stay until this member is done."""
        return self.closed | self.left | (self.settled if self.finished else set())

    def missing(self):
        with self.hall.lock:
            self.hear()
            return any(not alive and each not in self._out() for each, alive in self.hall.alive.items())

    def present(self, clients):
        with self.hall.lock:
            self._close_out()
            out = self.closed | self.left
            return [each for each in clients if self.hall.alive[each] and each not in out]

    def done(self, finished=True, again=False, view=frozenset()):
        with self.hall.lock:
            self.finished = finished
            self.hall.done.pop(self.client, None)
            if finished and view == self.closed:
                self.hall.done[self.client] = view

    def everyone_done(self):
        with self.hall.lock:
            self._close_out()
            return set(range(self.hall.clients)) - {self.client} <= self.settled | self.closed

    def leave(self, left):
        with self.hall.lock:
            self.hall.leaving = self.hall.leaving | {self.client}
            if left:
                self.hall.left = self.hall.left | {self.client}

    def failure(self, what, clients, then=""):
        return HyperpushError(f"peer {self.client}: {what} {sorted(clients)}{then}")

    def finish(self): ...
    def refuse(self, sender, reason, step): ...
    def acknowledge(self, step): ...
    def close(self): ...


def walk(hall, network, program, start_of, client, *, store=None, dies=None, on_progress=None, record=None, seat=Seat):
    """Run one member, restart it from its store after each death, and return its state and its peer."""
    lives = [dies, None] if not isinstance(dies, list) else [*dies, None]
    for number, each in enumerate(lives):
        if number:
            hall.back(client)
        with jax.enable_x64(True):
            peer = Peer(client, network, seat(hall, client, each), jax.random.key(3), tolerant=True, store=store)

            def progress(name, done, total, peer=peer):
                if on_progress is not None:
                    on_progress(peer, client, name, done)

            try:
                return peer.run(program, start_of(client), None, record, progress=progress), peer
            except ConnectionAbortedError:
                assert store is not None
    raise AssertionError("it died in its last life")
