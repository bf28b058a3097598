"""A `Transport` on Eclipse Zenoh: one session per peer, links to its neighbours only, nobody in between.

Messages go out reliably and wait where a link is congested (Zenoh's DROP would lose every long message on a slow link),
in parts of one size. Who sent one is the name in its key, which access control compares with the certificate.

On a second channel (`control`) peers say hello (who they are in this run, which configuration they hold, from which
step on they need messages), acknowledge what they need no more, announce that they are done, and who is closed out or
has left. Liveliness tells who is there. On a third (`pace`), asynchronously, they ask each other how fast they are;
that never waits for a congested link.
"""

import math
import queue
import secrets
import threading
import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Literal, final

from hyperpush.engines.transport import LAST
from hyperpush.engines.wire import Reason, Rejected, Rejections
from hyperpush.errors import HyperpushError, InvalidInput, unknown
from hyperpush.peers import deadlines
from hyperpush.peers import session as sessions
from hyperpush.peers.control import Kind, Leaves, Said, unpacked
from hyperpush.peers.deadlines import Deadline, Pace, Rounds
from hyperpush.peers.parts import Assembly, split
from hyperpush.peers.session import Address, Identity, alive_key, message_key

Mode = Literal["synchronous", "asynchronous"]

LIMIT = 256 << 20  # bytes of the longest payload, unless told otherwise
HELD = 1 << 30  # bytes of payloads of one sender that may wait for their step
LEAD = 2  # rounds that a peer may be ahead of a neighbour before it waits for it, asynchronously
ACKNOWLEDGE = 8  # steps between acknowledgements
OVERTAKES = 10.0  # seconds by which the news that somebody is done may come before its last message
ASK_EVERY, ASK_BEHIND = 0.1, 0.02  # seconds between questions for a neighbour's pace; while it is waited for
_AGAIN = "again"  # a task like the kinds of control messages: send what is kept again


@final
@dataclass
class Neighbour:
    """What is known of another peer."""

    name: str
    assembly: Assembly
    deadline: Deadline
    alive: bool = False
    agreed: bool = False  # it has said hello and holds the same configuration
    done: bool = False
    done_since: float = math.inf
    incarnation: int = 0
    last_seen: float = -math.inf
    lost: float = field(default_factory=time.monotonic)  # since when it is gone
    step: int = -1  # of its newest message, or to which it says that it has come
    answering: bool = False  # an answer to its question for our pace waits to be sent
    received_bytes: int = 0
    sent_bytes: int = 0
    mail: list[tuple[int, bytes | bytearray]] = field(default_factory=list)
    mail_bytes: int = 0
    kept: deque[tuple[int, bytes | bytearray]] = field(default_factory=deque)  # sent, and perhaps to be sent again


@final
class Zenoh:
    """One peer's access to the network.

    `names` are the peers of the run in the order of their clients, `links` those that this one ever talks to, with the
    address of each that is to be dialled. `digest` stands for the configuration: peers that hold another are refused.

    Synchronous: `collect` waits `patience` seconds for everybody expected, then it is an error; what was sent is kept
    until acknowledged, and sent again to a peer that comes back. A step may be collected again, for those whose message
    turned out not to fit. Asynchronous: it waits as long as a neighbour needs for a round and a message for the way,
    and not for those that are gone; whoever is more than LEAD rounds ahead of a neighbour waits for it, `longest_wait`
    seconds a round at most; who is gone for `close_after` seconds is closed out.

    `durable` says that the caller calls `acknowledge` itself, as it may be restarted from what it has stored;
    `closed` and `left` are those who were closed out, and those who had left, before. A payload of more than `limit`
    bytes is refused, by who would send it and by who gets it.
    """

    def __init__(
        self,
        run: str,
        names: Sequence[str],
        client: int,
        links: Mapping[str, Address | None],
        *,
        listen: Address | None = None,
        identity: Identity | None = None,
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
        if mode not in ("synchronous", "asynchronous"):
            raise unknown("mode", mode, ("synchronous", "asynchronous"))
        if not 0 <= client < len(names):
            raise InvalidInput("client", client, f"a client from 0 to {len(names) - 1}")
        for name in links:
            if name not in names or name == names[client]:
                raise unknown("links", name, set(names) - {names[client]})
        for option, value in (("patience", patience), ("close_after", close_after), ("longest_wait", longest_wait)):
            if not value > 0:
                raise InvalidInput(option, value, "a positive number of seconds")
        self.run, self.names, self.client, self.digest, self.mode = run, tuple(names), client, digest, mode
        self.patience, self.close_after, self.durable = patience, close_after, durable
        self.asynchronous = mode == "asynchronous"
        self.rejections = Rejections()
        self.closed, self.limit = frozenset(closed), limit
        self.left = self.leaving = frozenset(left)
        self._leaves = Leaves.NO
        self.sent_messages = 0
        self._places = {name: place for place, name in enumerate(names)}
        self._others = {
            self._places[name]: Neighbour(name, Assembly(limit), Deadline(most=longest_wait)) for name in links
        }
        for place in self.left & set(self._others):
            self._others[place].done = True
        self._changed = threading.Condition()
        self._numbers = count()
        self._incarnation = secrets.randbits(63)
        self._needed = 0  # the first step of which messages are needed
        self._finished, self._finished_before, self._finished_in = False, False, frozenset[int]()
        self._collecting = -1, 0.0  # a step, and since when it is waited for
        self._rounds = Rounds()
        self._failure: str | None = None
        self._open = True
        self._tasks: queue.SimpleQueue[tuple[Kind | str, int, int] | None] = queue.SimpleQueue()
        self._questions: queue.SimpleQueue[tuple[int, int | None] | None] = queue.SimpleQueue()
        configuration = sessions.settings(run, names[client], listen, links, identity)
        self._session = sessions.opened(configuration)
        self._publishers: dict[tuple[int, str], Any] = {}
        self._held: list[Any] = []  # Zenoh forgets what nobody holds
        self._workers = [
            threading.Thread(target=work, name=f"{names[client]} {channel}", daemon=True)
            for channel, work in (("control", self._work), ("pace", self._tell_paces))
        ]
        try:
            self._declare(links)
        except BaseException:
            self._session.close()
            raise
        for worker in self._workers:
            worker.start()

    def _declare(self, links: Mapping[str, Address | None]) -> None:
        import zenoh

        me = self.names[self.client]
        for name in links:
            other = self._places[name]
            takes = {"data": self._on_data, "control": self._on_control, "pace": self._on_pace}
            for channel in sessions.CHANNELS if self.asynchronous else ("data", "control"):
                take = takes[channel]
                full = zenoh.CongestionControl.DROP if channel == "pace" else zenoh.CongestionControl.BLOCK
                publisher = self._session.declare_publisher(
                    message_key(self.run, me, name, channel),
                    congestion_control=full,
                    reliability=zenoh.Reliability.RELIABLE,
                    express=channel != "data",
                )
                self._publishers[other, channel] = publisher
                key = message_key(self.run, name, me, channel)
                self._held.append(
                    self._session.declare_subscriber(key, lambda sample, o=other, f=take: self._guarded(f, o, sample))
                )
            watch = self._session.liveliness().declare_subscriber(
                alive_key(self.run, name), lambda sample, o=other: self._on_life(o, sample), history=True
            )
            self._held.append(watch)
        self._held.append(self._session.info.declare_link_events_listener(self._on_link, history=True))
        # Last: who sees the token knows that the subscribers are there.
        self._held.append(self._session.liveliness().declare_token(alive_key(self.run, me)))

    # -------------------------------------------------------------- transport

    def send(self, to: int, step: int, payload: bytes | bytearray) -> None:
        """See `Transport.send`."""
        other = self._neighbour("to", to)
        if len(payload) > self.limit:
            allowed = f"at most {self.limit} bytes: smaller messages, or a larger `limit` of every peer's transport"
            raise InvalidInput("message", f"{len(payload)} bytes", allowed)
        with self._changed:
            self._check()
            if not self.asynchronous:
                other.kept.append((step, payload))
        self._put(to, step, payload)
        self.sent_messages += 1

    def collect(self, step: int, expected: Collection[int]) -> list[tuple[int, bytes | bytearray]]:
        """See `Transport.collect`."""
        others = {sender: self._neighbour("expected", sender) for sender in expected}
        with self._changed:
            start = time.monotonic()
            if self._collecting[0] != step:  # patience does not begin anew with what did not fit
                self._collecting = step, start
            if self.asynchronous and step < LAST:
                self._rounds.ends(step)
                self._ask(self._others, ASK_EVERY)
            while True:
                self._check()
                self._close_out()
                now = time.monotonic()
                waiting = {
                    sender: other
                    for sender, other in others.items()
                    if not any(at == step for at, _ in other.mail) and not self._hopeless(sender, other)
                }
                if self.asynchronous:
                    waiting = {s: o for s, o in waiting.items() if start + o.deadline.seconds > now}
                    behind = {s: o for s, o in self._behind(step).items() if others and start + o.deadline.most > now}
                    if not waiting and not behind:
                        break
                    unheard = {s for s, o in waiting.items() if not o.deadline.known}
                    self._ask(unheard | set(behind), ASK_BEHIND)  # their messages may be lost
                    until = start + max(
                        [o.deadline.most for o in behind.values()] + [o.deadline.seconds for o in waiting.values()]
                    )
                    until = min(until, now + ASK_BEHIND) if unheard or behind else until
                else:
                    if not waiting:
                        break
                    until = self._collecting[1] + self.patience
                    self._complain(step, waiting, now >= until)
                self._changed.wait(min(until - now, 1.0))
            found = []
            for sender in sorted(self._others):
                other = self._others[sender]
                due = [mail for mail in other.mail if mail[0] <= step]
                other.mail = [mail for mail in other.mail if mail[0] > step]
                other.mail_bytes = sum(len(payload) for _, payload in other.mail)
                if not self.asynchronous:
                    due = [mail for mail in due if mail[0] == step]
                found += [(sender, payload) for _, payload in sorted(due, key=lambda mail: mail[0])]
            self._needed = max(self._needed, step)
            self._rounds.begins()
        if not self.asynchronous and not self.durable and step % ACKNOWLEDGE == 0:
            self.acknowledge(step)
        return found

    def _ask(self, others: Collection[int], every: float) -> None:
        """Ask those who take part for their pace, if that was some time ago."""
        now = time.monotonic()
        for place in others:
            other = self._others[place]
            out = place in self.closed | self.leaving or other.done or not (other.alive and other.agreed)
            if not out and other.deadline.due(every, now):
                self._questions.put((place, None))

    def acknowledge(self, step: int) -> None:
        """Tell the neighbours that nothing before `step` will be needed again, even after a restart."""
        for other in self._others:
            self._tasks.put((Kind.ACKNOWLEDGE, other, step))

    def close(self) -> None:
        """See `Transport.close`."""
        with self._changed:
            if not self._open:
                return
            self._open = False
            self._changed.notify_all()
        self._tasks.put(None)
        self._questions.put(None)
        for worker in self._workers:
            worker.join(10)
        self._held.clear()
        self._session.close()

    # ------------------------------------------------------------- membership

    def ready(self, step: int = 0, everyone: bool = True) -> None:
        """Say hello and wait for the neighbours' hellos: for `patience` seconds, or with `everyone=False`, a moment."""
        with self._changed:
            self._needed = step
            for other in self._others:
                self._tasks.put((Kind.HELLO, other, step))
            until = time.monotonic() + (self.patience if everyone else min(self.patience, 2.0))
            while missing := self._absent():
                self._check()
                left = until - time.monotonic()
                if left <= 0:
                    if not everyone:
                        for other in self._others.values():  # they have all of `close_after` from now on
                            other.lost = math.inf if other.alive else time.monotonic()
                        break
                    raise HyperpushError(f"{self._me}: no hello within {self.patience:g} s from {', '.join(missing)}")
                self._changed.wait(min(left, 1.0))
            self._check()
            self._rounds.begins()

    def _absent(self) -> list[str]:
        # A hello may be read after the news that its sender has died: only liveliness says who lives.
        there = {place for place, other in self._others.items() if other.agreed and other.alive}
        return [other.name for place, other in self._others.items() if place not in there | self.closed | self.left]

    def done(self, finished: bool = True, again: bool = False, view: frozenset[int] = frozenset()) -> None:
        """See `Members.done`; with `finished=False`, this peer needs something again, as the view has changed."""
        with self._changed:
            self._finished, self._finished_before, self._finished_in = finished, again, view
        for other in self._others if finished else ():
            self._tasks.put((Kind.DONE, other, 0))

    @property
    def settled(self) -> frozenset[int]:
        """See `Members.settled`."""
        return frozenset(place for place, other in self._others.items() if other.done)

    def everyone_done(self) -> bool:
        """Whether all neighbours that are not closed out have said that they are done."""
        with self._changed:
            self._check()
            self._close_out()
            return all(other.done for place, other in self._others.items() if place not in self.closed)

    def leave(self, left: bool) -> None:
        """See `Members.leave`."""
        with self._changed:
            self._leaves = Leaves.LEFT if left else Leaves.LEAVING
            self._tell_members()

    def stop(self, why: str) -> None:
        """Give up: whoever waits here, or sends, gets an error that says why. Nothing is told to the others."""
        with self._changed:
            self._failure = self._failure or why
            self._changed.notify_all()

    def present(self, clients: list[int]) -> list[int]:
        """See `Members.present`."""
        with self._changed:
            self._check()
            self._close_out()
            return [
                client
                for client in clients
                if client in self._others
                and client not in self.closed
                and client not in self.left
                and self._others[client].alive
            ]

    def missing(self) -> bool:
        """See `Members.missing`."""
        with self._changed:
            self._check()
            self._close_out()
            found = any(not (other.alive or self._out(place, other)) for place, other in self._others.items())
            if found:  # what is waited for somebody is not part of a round
                self._rounds.interrupted()
            return found

    def finish(self) -> None:
        """Be done, and wait until everybody is: until then a neighbour may come back and need what was sent to it."""
        self.done()
        until = time.monotonic() + self.patience
        while not self.everyone_done():
            with self._changed:
                if time.monotonic() > until:
                    late = [o.name for s, o in self._others.items() if not o.done and s not in self.closed]
                    raise HyperpushError(f"{self._me}: done, but not within {self.patience:g} s: {', '.join(late)}")
                self._changed.wait(0.2)

    def alive(self, client: int) -> bool:
        """Whether a neighbour is there."""
        return self._others[client].alive

    def status(self) -> dict[str, dict[str, Any]]:
        """What is known of each neighbour, by name."""
        now = time.monotonic()
        with self._changed:
            return {
                other.name: {
                    "alive": other.alive,
                    "closed": place in self.closed,
                    "step": other.step,
                    "last_seen": round(now - other.last_seen, 3) if other.last_seen > -math.inf else None,
                    "received_bytes": other.received_bytes,
                    "sent_bytes": other.sent_bytes,
                }
                | ({"deadline": round(other.deadline.seconds, 4)} if self.asynchronous else {})
                for place, other in self._others.items()
            }

    # --------------------------------------------------------------- incoming

    def _guarded(self, take: Any, place: int, sample: Any) -> None:
        """Whatever comes in, nothing but a count may come of it if it does not fit."""
        try:
            attached = sample.attachment
            take(place, b"" if attached is None else attached.to_bytes(), sample.payload.to_bytes())
        except Rejected as rejected:
            self.rejections.add(rejected.reason)

    def _on_data(self, place: int, header: bytes, part: bytes) -> None:
        other = self._others[place]
        with self._changed:
            other.received_bytes += len(part)
            other.last_seen = time.monotonic()
            complete = other.assembly.add(header, part)
            if complete is None:
                return
            step, payload = complete
            if not self.asynchronous and (step < self._needed or (step, payload) in other.mail):
                return  # sent again, but had come the first time
            if other.mail_bytes + len(payload) > HELD:
                raise Rejected(Reason.OVERFLOW, f"{other.mail_bytes} bytes wait for their step")
            other.mail.append((step, payload))
            other.mail_bytes += len(payload)
            other.step = max(other.step, step)
            self._changed.notify_all()

    def _on_control(self, place: int, header: bytes, payload: bytes) -> None:
        if header:
            raise Rejected(Reason.BAD_CONTROL, "it has an attachment")
        said = unpacked(payload, len(self.names))
        if (said.closed or said.left or said.leaves) and not self.asynchronous:
            raise Rejected(Reason.BAD_CONTROL, "it closes out peers, or lets them leave, in step")
        if said.kind != Kind.HELLO and said.digest != self.digest:
            raise Rejected(Reason.BAD_CONTROL, "it is of another configuration")
        other = self._others[place]
        with self._changed:
            other.last_seen = time.monotonic()
            if said.digest != self.digest:
                self._failure = (
                    f"{other.name} holds another configuration, {said.digest.hex()[:16]}…, than "
                    f"{self.names[self.client]}, {self.digest.hex()[:16]}…"
                )
                self._changed.notify_all()
                # Let it know too: its own error names both.
                if said.answer != self._incarnation:
                    self._tasks.put((Kind.HELLO, place, self._needed))
                return
            if place in self.closed:  # it is told so, and what it says of others is of its own side of a split
                if said.kind == Kind.HELLO:
                    other.incarnation = said.incarnation
                    if said.answer != self._incarnation:
                        self._tasks.put((Kind.HELLO, place, self._needed))
                return
            self._note_closed(said.closed, other.name)
            if said.leaves:
                self.leaving = self.leaving | {place}
            self._note_left(said.left | ({place} if said.leaves == Leaves.LEFT else frozenset()))
            if said.kind == Kind.HELLO:
                if other.incarnation != said.incarnation:
                    other.incarnation, other.done, other.step = said.incarnation, place in self.left, -1
                    other.deadline.forget()
                if said.answer != self._incarnation:  # it has not heard from this process yet
                    self._tasks.put((Kind.HELLO, place, self._needed))
                other.agreed = True
                self._forget(other, said.step)
                self._tasks.put((_AGAIN, place, 0))
                if self._finished:
                    self._tasks.put((Kind.DONE, place, 0))
            elif said.kind == Kind.ACKNOWLEDGE:
                self._forget(other, said.step)
            elif said.kind == Kind.DONE:
                # Done among others than those we know of is not done.
                other.done, other.done_since = said.closed == self.closed, time.monotonic()
            self._changed.notify_all()

    def _on_pace(self, place: int, header: bytes, payload: bytes) -> None:
        if header:
            raise Rejected(Reason.BAD_CONTROL, "it has an attachment")
        said, other = deadlines.unpacked(payload), self._others[place]
        with self._changed:
            if (said.incarnation, said.known) != (other.incarnation, self._incarnation) or place in self.closed:
                return  # of or for a process that is gone, or who is out
            other.last_seen = time.monotonic()
            if said.pace:
                other.step, other.deadline.pace = max(other.step, said.step), said.pace / 1e6
            if said.answer:
                other.deadline.answered(said.sent)
            elif not other.answering:
                other.answering = True
                self._questions.put((place, said.sent))
            self._changed.notify_all()

    def _on_life(self, place: int, sample: Any) -> None:
        import zenoh

        other = self._others[place]
        with self._changed:
            if sample.kind == zenoh.SampleKind.PUT:
                self._lives(other)
                self._tasks.put((Kind.HELLO, place, self._needed))
            else:
                other.alive, other.lost = False, time.monotonic()
            self._changed.notify_all()

    def _on_link(self, event: Any) -> None:
        """Count links whose certificate names nobody that we know: access control lets nothing through them."""
        import zenoh

        name = event.link.auth_identifier
        if event.kind == zenoh.SampleKind.PUT and name is not None and name not in self._places:
            self.rejections.add("stranger")

    @staticmethod
    def _lives(other: Neighbour) -> None:
        other.alive, other.lost, other.last_seen = True, math.inf, time.monotonic()

    @staticmethod
    def _forget(other: Neighbour, step: int) -> None:
        while other.kept and other.kept[0][0] < step:
            other.kept.popleft()

    def _close_out(self) -> None:
        """Close out whoever is gone for too long, and tell the others."""
        if not self.asynchronous:
            return
        now = time.monotonic()
        gone = set[int]()
        for place, other in self._others.items():
            if self._out(place, other) or now - other.lost <= self.close_after:
                continue
            if self._finished_before and not other.incarnation:  # it has heard that we are done, and ended
                other.done = True
            else:
                gone.add(place)
        self._note_closed(gone, self.names[self.client])

    def _out(self, place: int, other: Neighbour) -> bool:
        """Whether somebody may be gone for good and is not to be closed out; who is done does not end before we are."""
        return place in self.closed or place in self.left or (other.done and self._finished)

    def _note_closed(self, gone: Collection[int], by: str) -> None:
        new = set(gone) - self.closed
        if not new:
            return
        if self.client in new:
            self._failure = f"closed out by {by}: the others have gone on without this peer"
            new.discard(self.client)
        self.closed = self.closed | new
        for place, other in self._others.items():
            other.done = place in self.left
        self._tell_members()
        self._changed.notify_all()

    def _note_left(self, gone: Collection[int]) -> None:
        new = set(gone) - self.left - {self.client}
        if not new:
            return
        self.left, self.leaving = self.left | new, self.leaving | new
        for place in new & set(self._others):
            self._others[place].done = True
        self._tell_members()  # who was away when they left, and comes back, must not close them out

    def _tell_members(self) -> None:
        for place in self._others:
            if place not in self.closed:
                self._tasks.put((Kind.MEMBERS, place, 0))

    def _behind(self, step: int) -> dict[int, Neighbour]:
        """Who is there but more than LEAD rounds behind: whoever runs away from it would push away all of its mass."""
        return {
            place: other
            for place, other in self._others.items()
            if 0 <= other.step < step - LEAD
            and other.alive
            and not other.done
            and place not in self.closed | self.leaving
        }

    def _hopeless(self, place: int, other: Neighbour) -> bool:
        return self.asynchronous and (place in self.closed or not other.alive or other.done)

    def _complain(self, step: int, waiting: Mapping[int, Neighbour], late: bool) -> None:
        before = time.monotonic() - min(OVERTAKES, self.patience)
        left = [other.name for other in waiting.values() if other.done and other.done_since < before]
        if left:
            raise HyperpushError(f"{self._me}, step {step}: done before sending: {', '.join(left)}")
        if late:
            names = ", ".join(o.name if o.alive else f"{o.name} (gone)" for o in waiting.values())
            raise HyperpushError(f"{self._me}, step {step}: no message within {self.patience:g} s from {names}")

    def _check(self) -> None:
        if self._failure is not None:
            raise HyperpushError(f"{self._me}: {self._failure}")
        if not self._open:
            raise HyperpushError(f"{self._me}: its transport is closed")

    @property
    def _me(self) -> str:
        return f"peer {self.names[self.client]}"

    def _neighbour(self, field: str, place: int) -> Neighbour:
        if place not in self._others:
            raise InvalidInput(field, place, f"one of the neighbours {sorted(self._others)}")
        return self._others[place]

    # --------------------------------------------------------------- outgoing

    def _work(self) -> None:
        """Send control messages, and messages again: callbacks of Zenoh must not wait for a congested link."""
        while (task := self._tasks.get()) is not None:
            kind, place, step = task
            other = self._others[place]
            if not isinstance(kind, Kind):
                with self._changed:
                    kept = list(other.kept)
                for at, payload in kept:
                    self._put(place, at, payload)
                continue
            with self._changed:
                if kind == Kind.DONE and not (self._finished and self._finished_in == self.closed):
                    continue  # it was true of another view
                about = self._leaves, step, self._incarnation, other.incarnation, self.digest, self.closed, self.left
            self._deliver(place, "control", Said(kind, *about).packed(len(self.names)), None)

    def _tell_paces(self) -> None:
        """Send questions for a pace, and answers to them."""
        while (task := self._questions.get()) is not None:
            place, asked = task
            other = self._others[place]
            with self._changed:
                if asked is not None:
                    other.answering = False
                step, typical, known = self._rounds.step, self._rounds.typical.seconds, other.incarnation
            pace = 0 if typical is None or step < 0 else min(math.ceil(typical * 1e6), deadlines.LONGEST)
            sent = deadlines.microseconds() if asked is None else asked
            message = Pace(asked is not None, self._incarnation, known, max(step, 0), pace, sent)
            self._deliver(place, "pace", message.packed(), None)

    def _put(self, to: int, step: int, payload: bytes | bytearray) -> None:
        for header, part in split(next(self._numbers), step, payload):
            self._deliver(to, "data", bytes(part), header)
        self._others[to].sent_bytes += len(payload)

    def _deliver(self, to: int, channel: str, payload: bytes, attachment: bytes | None) -> None:
        import zenoh

        try:
            self._publishers[to, channel].put(payload, attachment=attachment)
        except zenoh.ZError:  # the session closes; `_check` says why
            with self._changed:
                if self._open:
                    self._failure = self._failure or f"cannot send to {self.names[to]}"
