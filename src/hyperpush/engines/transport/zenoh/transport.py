"""The `Transport` on Eclipse Zenoh, with its threads and its protocol between peers.

Messages are sent reliably, in parts, and wait if a link is congested. (Zenoh's option DROP would lose every long
message on a slow link.) The sender of a message is the name in its key, which access control compares with the
certificate. Each part holds the run and the process that sent it, so messages of an earlier run or process are refused.

On a second channel (`control`) peers say hello. A hello holds the sender's process, configuration and code, and the
first step whose messages it needs. Two processes accept each other once each has answered the other's hello, so a
recorded hello is useless. On this channel peers also acknowledge messages, and announce that they are done, and which
members are removed or have left.

Zenoh's liveliness tokens show which peers are present. Asynchronous peers send heartbeats with their round time on a
third channel (`pace`). If a link is congested, heartbeats are dropped instead of waiting.
"""

import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from hashlib import blake2b
from itertools import count
from types import MappingProxyType
from typing import Any, Literal, final

import jax

from hyperpush.base.errors import Absent, HyperpushError, InvalidInput, Stopped
from hyperpush.engines.transport.retransmission import ACKNOWLEDGE_EVERY
from hyperpush.engines.transport.wire import RefusalReason
from hyperpush.engines.transport.zenoh.addresses import Address
from hyperpush.engines.transport.zenoh.agreement import NOT_COMPARED
from hyperpush.engines.transport.zenoh.control import Card, Topic
from hyperpush.engines.transport.zenoh.deadlines import HEARTBEAT, MOST_HEARTBEATS, Deadline, Rounds
from hyperpush.engines.transport.zenoh.endpoints import Endpoints
from hyperpush.engines.transport.zenoh.identity import Identity
from hyperpush.engines.transport.zenoh.incoming import Incoming
from hyperpush.engines.transport.zenoh.links import Link
from hyperpush.engines.transport.zenoh.membership import Membership
from hyperpush.engines.transport.zenoh.neighbors import Neighbor
from hyperpush.engines.transport.zenoh.parts import RUN_BYTES, Stamp, split
from hyperpush.engines.transport.zenoh.session import CHANNELS, open_session, session_number, settings
from hyperpush.engines.transport.zenoh.waits import Waits

Mode = Literal["synchronous", "asynchronous"]

# Default limit of a payload in bytes: 64 million parameters in float32. It bounds the memory that a broken neighbor can
# occupy.
LIMIT = 256 << 20
GUESTS_EVERY = 1.0  # largest number of seconds between two checks of incoming links (see `Guests`)
_AGAIN = "again"  # a task besides the topics of control messages: repeat unacknowledged messages


@final
class Zenoh:
    """One peer's access to the network. Its caller, `hp.Peers`, has checked the arguments.

    Synchronous: `collect` waits at most `patience` seconds for all expected messages, then raises an error. Sent
    messages are kept until acknowledged, and repeated to a peer that returns. A step may be collected again, for
    senders whose message was refused.

    Asynchronous: `collect` waits for a neighbor's usual round time plus the round trip, but not for absent peers. A
    peer that is more than LEAD rounds ahead of a neighbor waits for it, even if that neighbor is absent. A peer that is
    absent for `close_after` seconds is removed. So is a peer that has been behind for `patience` seconds without
    waiting itself.

    Args:
        run: Name of the run, part of every message's key.
        names: The peers of the run in the order of their clients.
        client: Number of this peer in `names`.
        links: The neighbors by name, with the address to dial; None: the neighbor dials.
        listen: The address to listen on. None: other peers cannot dial this one.
        identity: The files of this peer's certificate. None: no TLS, and loopback addresses only.
        digest: Digest of the configuration; peers with another one are refused.
        code: Digest of the program's code; peers with another one are refused. Zeros: not compared.
        mode: "synchronous" for rounds in lockstep, "asynchronous" for each peer at its own pace.
        patience: Seconds after which a wait fails with an error.
        close_after: Seconds after which an absent peer is removed; asynchronous mode only.
        longest_wait: Upper bound, in seconds, of deadlines for a neighbor's message; asynchronous mode only.
        durable: True if the caller calls `acknowledge` itself, because it may restart from a checkpoint.
        closed: Peers that were removed before.
        left: Peers that had left before.
        refused: Counts of messages with invalid content that were refused before, by peer and reason.
        resumed: True if this process may continue from an earlier one's checkpoint; False for a fresh start.
        limit: Largest payload of the program in bytes. Longer ones are refused by sender and receiver. The memory for
            waiting messages of one sender is bounded by a multiple of `limit`.
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
        code: bytes = NOT_COMPARED,
        mode: Mode = "synchronous",
        patience: float = 60.0,
        close_after: float = 10.0,
        longest_wait: float = 2.0,
        durable: bool = False,
        closed: Collection[int] = (),
        left: Collection[int] = (),
        refused: Mapping[int, Mapping[str, int]] = MappingProxyType({}),
        limit: int = LIMIT,
        resumed: bool = True,
    ):
        self.run, self.names, self.client = run, tuple(names), client
        self._me = f"peer {names[client]}"  # name in errors
        self.durable, self.limit = durable, limit
        self.asynchronous = mode == "asynchronous"
        places = [self.names.index(name) for name in links]
        self.neighbors = {place: Neighbor(names[place], Deadline(most=longest_wait)) for place in places}
        for place, reasons in refused.items():
            self.neighbors[place].refusals.update({RefusalReason(each): count for each, count in reasons.items()})
        self.links = {place: Link(limit, not self.asynchronous, self._drop(place)) for place in places}
        self._changed = threading.Condition()
        self._numbers = count()
        self._rounds = Rounds()
        self._closing = threading.Event()
        self._tasks: queue.SimpleQueue[tuple[Topic | str, int, int] | None] = queue.SimpleQueue()
        opened = open_session(settings(run, names[client], listen, links, identity))
        ends = 0 if identity is None else identity.ends
        self.members = Membership(
            self.names,
            client,
            self.neighbors,
            run=blake2b(digest + code + run.encode(), digest_size=RUN_BYTES).digest(),
            card=Card(digest, code, jax.__version__, ends, session_number(opened)),
            asynchronous=self.asynchronous,
            close_after=close_after,
            closed=closed,
            left=left,
            resumed=resumed,
            tell=lambda topic, place: self._tasks.put((topic, place, self.members.needed)),
            forget=lambda place, step: self.links[place].unacknowledged.acknowledge(step),
            send_again=lambda place: self._tasks.put((_AGAIN, place, 0)),
        )
        self._stamp = Stamp(self.members.run, self.members.incarnation)
        self.waits = Waits(self.members, self.links, self._rounds, self._changed, patience, self._check, self._ask)
        self._incoming = Incoming(self.members, self.links, self._changed)
        takes = {
            "data": self._incoming.on_data,
            "control": self._incoming.on_control,
            "pace": self._incoming.on_control,
        }
        self._endpoints = Endpoints(
            opened,
            run,
            names[client],
            {place: other.name for place, other in self.neighbors.items()},
            {channel: self._incoming.guard(takes[channel]) for channel in CHANNELS[: 2 + self.asynchronous]},
            self._incoming.on_life,
            self._incoming.on_link,
        )
        self._workers = [
            threading.Thread(target=work, name=f"{names[client]} {channel}", daemon=True)
            for channel, work in (("control", self._work), ("pace", self._beat))[: 1 + self.asynchronous]
        ]
        for worker in self._workers:
            worker.start()

    @property
    def patience(self) -> float:
        """Seconds after which a wait fails with an error."""
        return self.waits.patience

    @patience.setter
    def patience(self, seconds: float) -> None:
        self.waits.patience = seconds

    @property
    def rejections(self) -> Counter[str]:
        """Counts of refused messages, links and hellos, by reason."""
        return self._incoming.rejections

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
                self.waits.at_own_pace(step, expected)
            else:
                self.waits.in_step(step, expected)
            found = [(sender, payload) for sender in sorted(self.links) for payload in self.links[sender].take(step)]
            self.members.needed = max(self.members.needed, step)
            self._rounds.begin()
        if not self.asynchronous and not self.durable and step % ACKNOWLEDGE_EVERY == 0:
            self.acknowledge(step)
        return found

    def acknowledge(self, step: int) -> None:
        """Tell the neighbors that this peer will not need messages of steps before `step`, even after a restart."""
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
        """Say hello to all neighbors, and wait up to `patience` seconds for their hellos.

        With `everyone=False` the wait is at most 2 s, and missing neighbors do not raise an error.
        """
        with self._changed:
            self.members.needed = step
            for place in self.neighbors:
                self._tasks.put((Topic.HELLO, place, step))
            until = time.monotonic() + (self.patience if everyone else min(self.patience, 2.0))
            while missing := self.members.absent():
                self._check()
                left = until - time.monotonic()
                if left <= 0 and everyone:
                    raise self.waits.in_vain(f"no hello within {self.patience:g} s from", missing)
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
        """See `Members.done`. `finished=False` revokes the announcement after a change of the membership."""
        with self._changed:
            self.members.finish(finished, again, view)

    def refuse(self, sender: int, reason: RefusalReason, step: int) -> None:
        """See `Members.refuse`."""
        with self._changed:
            self.members.refuse(sender, reason, step)
            self._changed.notify_all()

    def failure(self, what: str, clients: Collection[int], then: str = "") -> HyperpushError:
        """See `Members.failure`."""
        with self._changed:
            others = [self.neighbors[each] for each in sorted(clients) if each in self.neighbors]
            return self.waits.in_vain(what, others, then=then)

    def everyone_done(self) -> bool:
        """Return True if all neighbors that are not removed have announced that they are done."""
        return not self._now(lambda: self.members.unfinished)

    def leave(self, left: bool) -> None:
        """See `Members.leave`."""
        with self._changed:
            self.members.leave(left)

    def stop(self, error: HyperpushError) -> None:
        """End this peer: all current waits and later calls raise `error`. The other peers are not informed."""
        with self._changed:
            self.members.fail(error)
            self._changed.notify_all()

    def news(self) -> list[str]:
        """Return lines about parties that were lost, found, removed or refused since the last call."""
        with self._changed:
            self.members.look_for_lost()
            lines = self.members.news
            return [lines.popleft() for _ in range(len(lines))]

    def present(self, clients: list[int]) -> list[int]:
        """See `Members.present`."""
        return self._now(lambda: self.members.present(clients))

    def missing(self) -> bool:
        """See `Members.missing`."""
        found = self._now(self.members.missing)
        self._rounds.waits = found
        if found:  # a wait for a peer is not part of a round
            self._rounds.interrupt()
        return found

    def _now(self, look: Callable[[], Any]) -> Any:
        """Remove members that are absent for too long, then return `look()`."""
        with self._changed:
            self._check()
            self.members.remove_gone()
            return look()

    def finish(self) -> None:
        """Announce that this peer is done, and wait until all others are done.

        Until then, a neighbor may return and need earlier messages again.
        """
        self.done()
        until = time.monotonic() + self.patience
        while late := self._now(lambda: self.members.unfinished):
            with self._changed:
                if time.monotonic() > until:
                    raise self.waits.in_vain(f"done, but no message 'done' within {self.patience:g} s from", late)
                self._changed.wait(0.2)

    def status(self) -> dict[str, dict[str, Any]]:
        """Return facts about each neighbor, by name."""
        with self._changed:
            self._incoming.look_at_guests()
            return {
                other.name: other.status()
                | {"closed": place in self.closed}
                | ({"deadline": round(other.deadline.seconds, 4)} if self.asynchronous else {})
                for place, other in self.neighbors.items()
            }

    # --------------------------------------------------------------- outgoing

    def _ask(self, topic: Topic, place: int, step: int) -> None:
        self._tasks.put((topic, place, step))

    def _drop(self, place: int) -> Callable[[RefusalReason], None]:
        return lambda reason: self._incoming.count(place, reason)

    def _check(self) -> None:
        self.members.check_certificates()
        if self.members.failure is not None:
            raise _named(self.members.failure, self._me)
        if self._closing.is_set():
            raise HyperpushError(f"{self._me}: its transport is closed")

    def _work(self) -> None:
        """Send control messages and repetitions in a thread: Zenoh's callbacks must not wait for a congested link."""
        while (task := self._next_task()) is not None:
            topic, place, step = task
            with self._changed:
                kept = self.links[place].unacknowledged.to_resend()
                if topic == Topic.DONE and not self.members.says_done:
                    continue  # this peer was done, but members were removed since
                said = self.members.message(topic, place, step) if isinstance(topic, Topic) else None
            if said is not None:
                self._deliver(place, "control", said.pack(len(self.names)), None)
                continue
            for at, payload in kept:
                self._put(place, at, payload)

    def _next_task(self) -> tuple[Topic | str, int, int] | None:
        """Wait for the next task of the control thread. Check incoming links for strangers' certificates meanwhile."""
        while True:
            with self._changed:
                self._incoming.look_at_guests()
            try:
                return self._tasks.get(timeout=GUESTS_EVERY)
            except queue.Empty:
                continue

    def _beat(self) -> None:
        """Send heartbeats to all present neighbors, in a thread."""
        while not self._closing.wait(max(HEARTBEAT, len(self.neighbors) / MOST_HEARTBEATS)):
            for place, other in self.neighbors.items():
                with self._changed:
                    said = self.members.heartbeat(place, self._rounds) if other.alive and other.agreed else None
                if said is not None:
                    self._deliver(place, "pace", said.pack(len(self.names)), None)

    def _put(self, to: int, step: int, payload: bytes | bytearray) -> None:
        for header, part in split(next(self._numbers), step, payload, self._stamp):
            self._deliver(to, "data", bytes(part), header)
        self.neighbors[to].sent_bytes += len(payload)

    def _deliver(self, to: int, channel: str, payload: bytes, attachment: bytes | None) -> None:
        if not self._endpoints.put(to, channel, payload, attachment):
            with self._changed:
                if not self._closing.is_set():
                    self.members.fail(Absent(f"cannot send to {self.names[to]}"))


def _named(error: HyperpushError, me: str) -> HyperpushError:
    """Return the error with this peer's name in front; a `Stopped` error contains the name already."""
    return error if isinstance(error, Stopped) else type(error)(f"{me}: {error}")
