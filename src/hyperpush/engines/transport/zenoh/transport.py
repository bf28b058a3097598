"""A `Transport` on Eclipse Zenoh: sessions, threads and waits.

Messages go out reliably and wait where a link is congested (Zenoh's DROP would lose every long message on a slow link),
in parts of one size. Who sent one is the name in its key, which access control compares with the certificate.

On a second channel (`control`) peers say hello (who they are in this run, which configuration they hold, from which
step on they need messages), acknowledge what they need no more, announce that they are done, and who is removed or
has left. Liveliness tells who is there. On a third (`pace`), asynchronously, they send heartbeats that say how fast
they are. A heartbeat never waits for a congested link: it is dropped.
"""

import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import count
from typing import Any, Literal, final

from hyperpush.base.errors import HyperpushError, InvalidInput
from hyperpush.engines.transport.protocol import LAST
from hyperpush.engines.transport.retransmission import ACKNOWLEDGE_EVERY
from hyperpush.engines.transport.wire import RefusalReason, Rejected
from hyperpush.engines.transport.zenoh.addresses import Address
from hyperpush.engines.transport.zenoh.control import Topic, unpack
from hyperpush.engines.transport.zenoh.deadlines import HEARTBEAT, MOST_HEARTBEATS, Deadline, Rounds
from hyperpush.engines.transport.zenoh.endpoints import Endpoints, Take
from hyperpush.engines.transport.zenoh.identity import Identity
from hyperpush.engines.transport.zenoh.links import Link
from hyperpush.engines.transport.zenoh.membership import Membership, Neighbor
from hyperpush.engines.transport.zenoh.parts import split
from hyperpush.engines.transport.zenoh.session import CHANNELS, open_session, settings

Mode = Literal["synchronous", "asynchronous"]

# Bytes of the longest payload, unless told otherwise: 64 million parameters in float32. It bounds what a broken
# neighbor can make us hold.
LIMIT = 256 << 20
# Seconds by which the news that somebody is done may come before its last message. Control messages overtake data: a
# payload of LIMIT bytes takes that long at 200 Mbit/s.
OVERTAKES = 10.0
_AGAIN = "again"  # a task like the topics of control messages: send what is kept again


@final
class Zenoh:
    """One peer's access to the network; `hp.Peers` checks what it is given.

    Synchronous: `collect` waits `patience` seconds for everybody expected, then it is an error. What was sent is kept
    until acknowledged, and sent again to a peer that comes back. A step may be collected again, for those whose message
    turned out not to fit. Asynchronous: it waits as long as a neighbor needs for a round and a message for the way, and
    not for messages of peers that are gone. A peer that is more than LEAD rounds ahead of a neighbor waits for it, even
    if that neighbor is gone. A peer that is gone for `close_after` seconds is removed. So is a peer that has been
    behind for `patience` seconds and is not waiting itself.

    Args:
        run: The name of the run: part of every message's key.
        names: The peers of the run in the order of their clients.
        client: Which of them this one is.
        links: Those that it ever talks to, with the address of each that is to be dialed.
        listen: The address that it listens on; None: nobody dials it.
        identity: Its certificate; None: no TLS, and loopback addresses only.
        digest: Stands for the configuration: peers that hold another are refused.
        mode: Whether peers go in step.
        patience: Seconds after which a wait is an error.
        close_after: Seconds after which, asynchronously, a peer that is gone is removed.
        longest_wait: Seconds that one waits for a neighbor's message at most, asynchronously.
        durable: Whether the caller calls `acknowledge` itself, as it may be restarted from what it has stored.
        closed: Those who were removed before.
        left: Those who had left before.
        limit: Bytes of the longest payload, which is refused by who would send it and by who gets it.
    """

    def __init__(
        self,
        run: str,
        names: Sequence[str],
        client: int,
        links: Mapping[str, Address | None],
        listen: Address | None = None,
        identity: Identity | None = None,
        *,
        digest: bytes = bytes(32),
        mode: Mode = "synchronous",
        patience: float = 60.0,
        close_after: float = 10.0,
        longest_wait: float = 2.0,
        durable: bool = False,
        closed: Collection[int] = (),
        left: Collection[int] = (),
        limit: int = LIMIT,
    ):
        self.run, self.names, self.client = run, tuple(names), client
        self._me = f"peer {names[client]}"  # in errors
        self.patience, self.durable, self.limit = patience, durable, limit
        self.asynchronous = mode == "asynchronous"
        self.rejections = Counter[str]()
        places = [self.names.index(name) for name in links]
        self.neighbors = {place: Neighbor(names[place], Deadline(most=longest_wait)) for place in places}
        self.links = {place: Link(limit, not self.asynchronous) for place in places}
        self._changed = threading.Condition()
        self._numbers = count()
        self._collecting = -1, 0.0  # a step, and since when it is waited for
        self._rounds = Rounds()
        self._closing = threading.Event()
        self._tasks: queue.SimpleQueue[tuple[Topic | str, int, int] | None] = queue.SimpleQueue()
        self.members = Membership(
            self.names,
            client,
            self.neighbors,
            digest=digest,
            asynchronous=self.asynchronous,
            close_after=close_after,
            closed=closed,
            left=left,
            tell=lambda topic, place: self._tasks.put((topic, place, self.members.needed)),
            forget=lambda place, step: self.links[place].unacknowledged.acknowledge(step),
            send_again=lambda place: self._tasks.put((_AGAIN, place, 0)),
        )
        takes = {"data": self._on_data, "control": self._on_control, "pace": self._on_control}
        self._endpoints = Endpoints(
            open_session(settings(run, names[client], listen, links, identity)),
            run,
            names[client],
            {place: other.name for place, other in self.neighbors.items()},
            {channel: self._guard(takes[channel]) for channel in CHANNELS[: 2 + self.asynchronous]},
            self._on_life,
            self._on_link,
        )
        self._workers = [
            threading.Thread(target=work, name=f"{names[client]} {channel}", daemon=True)
            for channel, work in (("control", self._work), ("pace", self._beat))[: 1 + self.asynchronous]
        ]
        for worker in self._workers:
            worker.start()

    # -------------------------------------------------------------- transport

    def send(self, to: int, step: int, payload: bytes | bytearray) -> None:
        """See `Transport.send`."""
        if len(payload) > self.limit:
            allowed = f"at most {self.limit} bytes: smaller messages, or a larger `limit` of every peer's transport"
            raise InvalidInput("message", f"{len(payload)} bytes", allowed)
        with self._changed:
            self._check()
            if not self.asynchronous:
                self.links[to].unacknowledged.keep(step, payload)
        self._put(to, step, payload)

    def collect(self, step: int, expected: Collection[int]) -> list[tuple[int, bytes | bytearray]]:
        """See `Transport.collect`."""
        with self._changed:
            if self.asynchronous:
                self._wait_at_own_pace(step, expected)
            else:
                self._wait_in_step(step, expected)
            found = [(sender, payload) for sender in sorted(self.links) for payload in self.links[sender].take(step)]
            self.members.needed = max(self.members.needed, step)
            self._rounds.begin()
        if not self.asynchronous and not self.durable and step % ACKNOWLEDGE_EVERY == 0:
            self.acknowledge(step)
        return found

    def _wait_in_step(self, step: int, expected: Collection[int]) -> None:
        """Wait until everybody's message is there; too long is an error."""
        if self._collecting[0] != step:  # patience does not begin anew with what did not fit
            self._collecting = step, time.monotonic()
        while True:
            self._check()
            waiting = [self.neighbors[sender] for sender in expected if not self.links[sender].has(step)]
            if not waiting:
                return
            left = self._collecting[1] + self.patience - time.monotonic()
            self._complain(step, waiting, left <= 0)
            self._changed.wait(min(left, 1.0))

    def _wait_at_own_pace(self, step: int, expected: Collection[int]) -> None:
        """Wait for each message until its deadline, and for who is far behind until it has come closer or is removed.

        Whoever is away is waited for, too: until it is back, or gone for `close_after` seconds.
        """
        start = time.monotonic()
        if step < LAST:
            self._rounds.end(step)
        try:
            while True:
                self._check()
                self.members.remove_gone()
                behind = self.members.behind(step)
                self.members.remove_stalled(behind, self.patience)
                self._rounds.waits = bool(behind)
                unheard = [e for e in expected if not (self.links[e].has(step) or self.members.is_hopeless(e))]
                waits = [self.neighbors[each].deadline.seconds for each in unheard]
                left = start + max(waits, default=0.0) - time.monotonic()
                if left <= 0 and not behind:
                    return
                self._changed.wait(min(left, 1.0) if left > 0 else 0.2)  # heartbeats, too, wake it
        finally:
            self._rounds.waits = False

    def acknowledge(self, step: int) -> None:
        """Tell the neighbors that nothing before `step` will be needed again, even after a restart."""
        for place in self.neighbors:
            self._tasks.put((Topic.ACKNOWLEDGE, place, step))

    def close(self) -> None:
        """See `Transport.close`."""
        with self._changed:
            if self._closing.is_set():
                return
            self._closing.set()
            self._changed.notify_all()
        self._tasks.put(None)
        for worker in self._workers:
            worker.join(10)
        self._endpoints.close()

    # ---------------------------------------------------------------- members

    def ready(self, step: int = 0, everyone: bool = True) -> None:
        """Say hello and wait for the neighbors' hellos: for `patience` seconds, or with `everyone=False`, a moment."""
        with self._changed:
            self.members.needed = step
            for place in self.neighbors:
                self._tasks.put((Topic.HELLO, place, step))
            until = time.monotonic() + (self.patience if everyone else min(self.patience, 2.0))
            while missing := self.members.absent():
                self._check()
                left = until - time.monotonic()
                if left <= 0 and everyone:
                    raise HyperpushError(f"{self._me}: no hello within {self.patience:g} s from {', '.join(missing)}")
                if left <= 0:
                    self.members.excuse_absent()
                    break
                self._changed.wait(min(left, 1.0))
            self._check()
            self._rounds.begin()

    @property
    def closed(self) -> frozenset[int]:
        """See `Members.closed`."""
        return self.members.closed

    @property
    def left(self) -> frozenset[int]:
        """See `Members.left`."""
        return self.members.left

    @property
    def leaving(self) -> frozenset[int]:
        """See `Members.leaving`."""
        return self.members.leaving

    @property
    def settled(self) -> frozenset[int]:
        """See `Members.settled`."""
        return frozenset(place for place, other in self.neighbors.items() if other.done)

    def done(self, finished: bool = True, again: bool = False, view: frozenset[int] = frozenset()) -> None:
        """See `Members.done`; with `finished=False`, this peer needs something again, as the view has changed."""
        with self._changed:
            self.members.finish(finished, again, view)

    def everyone_done(self) -> bool:
        """Whether all neighbors that are not removed have said that they are done."""
        return not self._now(lambda: self.members.unfinished)

    def leave(self, left: bool) -> None:
        """See `Members.leave`."""
        with self._changed:
            self.members.leave(left)

    def stop(self, why: str) -> None:
        """Give up: whoever waits here, or sends, gets an error that says why. Nothing is told to the others."""
        with self._changed:
            self.members.failure = self.members.failure or why
            self._changed.notify_all()

    def present(self, clients: list[int]) -> list[int]:
        """See `Members.present`."""
        return self._now(lambda: self.members.present(clients))

    def missing(self) -> bool:
        """See `Members.missing`."""
        found = self._now(self.members.missing)
        self._rounds.waits = found
        if found:  # what is waited for somebody is not part of a round
            self._rounds.interrupt()
        return found

    def _now(self, look: Callable[[], Any]) -> Any:
        """What is so once those who are gone for too long are removed."""
        with self._changed:
            self._check()
            self.members.remove_gone()
            return look()

    def finish(self) -> None:
        """Be done, and wait until everybody is: until then a neighbor may come back and need what was sent to it."""
        self.done()
        until = time.monotonic() + self.patience
        while late := self._now(lambda: self.members.unfinished):
            with self._changed:
                if time.monotonic() > until:
                    raise HyperpushError(f"{self._me}: done, but not within {self.patience:g} s: {', '.join(late)}")
                self._changed.wait(0.2)

    def status(self) -> dict[str, dict[str, Any]]:
        """What is known of each neighbor, by name."""
        with self._changed:
            return {
                other.name: other.status()
                | {"closed": place in self.closed}
                | ({"deadline": round(other.deadline.seconds, 4)} if self.asynchronous else {})
                for place, other in self.neighbors.items()
            }

    # --------------------------------------------------------------- incoming

    def _guard(self, take: Take) -> Take:
        """Whatever comes in, nothing but a count may come of it if it does not fit."""

        def handle(place: int, header: bytes, payload: bytes) -> None:
            with self._changed:
                try:
                    take(place, header, payload)
                except Rejected as rejected:
                    self.rejections[rejected.reason.value] += 1
                self._changed.notify_all()

        return handle

    def _on_data(self, place: int, header: bytes, part: bytes) -> None:
        other = self.neighbors[place]
        other.received_bytes += len(part)
        other.last_seen = time.monotonic()
        step = self.links[place].add(header, part, self.members.needed)
        if step is not None:
            other.come_to(step)

    def _on_control(self, place: int, header: bytes, payload: bytes) -> None:
        if header:
            raise Rejected(RefusalReason.BAD_CONTROL, "it has an attachment")
        self.members.hear(place, unpack(payload, len(self.names)))

    def _on_life(self, place: int, alive: bool) -> None:
        with self._changed:
            self.members.hear_life(place, alive)
            self._changed.notify_all()

    def _on_link(self, name: str | None) -> None:
        """Count links whose certificate names nobody that we know: access control lets nothing through them."""
        if name is not None and name not in self.names:
            with self._changed:
                self.rejections["stranger"] += 1

    # ----------------------------------------------------------------- errors

    def _complain(self, step: int, waiting: Sequence[Neighbor], late: bool) -> None:
        before = time.monotonic() - min(OVERTAKES, self.patience)
        left = [other.name for other in waiting if other.done and other.done_since < before]
        if left:
            raise HyperpushError(f"{self._me}, step {step}: done before sending: {', '.join(left)}")
        if late:
            names = ", ".join(o.name if o.alive else f"{o.name} (gone)" for o in waiting)
            raise HyperpushError(f"{self._me}, step {step}: no message within {self.patience:g} s from {names}")

    def _check(self) -> None:
        if self.members.failure is not None:
            raise HyperpushError(f"{self._me}: {self.members.failure}")
        if self._closing.is_set():
            raise HyperpushError(f"{self._me}: its transport is closed")

    # --------------------------------------------------------------- outgoing

    def _work(self) -> None:
        """Send control messages, and messages again: callbacks of Zenoh must not wait for a congested link."""
        while (task := self._tasks.get()) is not None:
            topic, place, step = task
            with self._changed:
                kept = self.links[place].unacknowledged.to_resend()
                if topic == Topic.DONE and not self.members.says_done:
                    continue  # it was true of another view
                said = self.members.message(topic, place, step) if isinstance(topic, Topic) else None
            if said is not None:
                self._deliver(place, "control", said.pack(len(self.names)), None)
                continue
            for at, payload in kept:
                self._put(place, at, payload)

    def _beat(self) -> None:
        """Send heartbeats."""
        while not self._closing.wait(max(HEARTBEAT, len(self.neighbors) / MOST_HEARTBEATS)):
            for place, other in self.neighbors.items():
                with self._changed:
                    said = self.members.heartbeat(place, self._rounds) if other.alive and other.agreed else None
                if said is not None:
                    self._deliver(place, "pace", said.pack(len(self.names)), None)

    def _put(self, to: int, step: int, payload: bytes | bytearray) -> None:
        for header, part in split(next(self._numbers), step, payload):
            self._deliver(to, "data", bytes(part), header)
        self.neighbors[to].sent_bytes += len(payload)

    def _deliver(self, to: int, channel: str, payload: bytes, attachment: bytes | None) -> None:
        if not self._endpoints.put(to, channel, payload, attachment):
            with self._changed:
                if not self._closing.is_set():
                    self.members.failure = self.members.failure or f"cannot send to {self.names[to]}"
