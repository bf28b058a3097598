"""Who takes part: what is known of the neighbors, and what to tell them.

Policy only: it sends nothing itself, never waits, and is called with the transport's lock held.
"""

import math
import secrets
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, final

from hyperpush.engines.transport.protocol import LAST, LEAD
from hyperpush.engines.transport.wire import RefusalReason, Rejected
from hyperpush.engines.transport.zenoh.control import ControlMessage, Departure, Topic
from hyperpush.engines.transport.zenoh.deadlines import Deadline, Rounds, microseconds


@final
@dataclass
class Neighbor:
    """What is known of another peer."""

    name: str
    deadline: Deadline
    alive: bool = False
    agreed: bool = False  # it has said hello and holds the same configuration
    done: bool = False
    done_since: float = math.inf
    incarnation: int = 0
    last_seen: float = -math.inf
    lost: float = field(default_factory=time.monotonic)  # since when it is gone
    step: int = -1  # of its newest message, or to which it says that it has come
    advanced: float = field(default_factory=time.monotonic)  # when it did, or said that it waits for somebody
    received_bytes: int = 0
    sent_bytes: int = 0

    def come_to(self, step: int) -> None:
        """It has come to a step."""
        if step > self.step:
            self.step, self.advanced = step, time.monotonic()

    def status(self) -> dict[str, Any]:
        """What to show of it."""
        seen = round(time.monotonic() - self.last_seen, 3) if self.last_seen > -math.inf else None
        sizes = {"received_bytes": self.received_bytes, "sent_bytes": self.sent_bytes}
        return {"alive": self.alive, "step": self.step, "last_seen": seen, **sizes}


@final
class Membership:
    """Who is there, is done, leaves, has left or is removed.

    Args:
        names: All peers of the run, in the order of their clients.
        client: Which of them this one is.
        neighbors: Those that it talks to, by their client.
        digest: Stands for the configuration: peers that hold another are refused.
        asynchronous: Whether peers may vanish, leave and be removed.
        close_after: Seconds after which one that is gone is removed.
        closed, left: Those who were removed, and those who had left, before this process started.
        tell: Has a message on a topic sent to a neighbor.
        forget: Notes that a neighbor needs nothing before a step.
        send_again: Has what a neighbor still needs sent again to it.
    """

    def __init__(
        self,
        names: Sequence[str],
        client: int,
        neighbors: Mapping[int, Neighbor],
        *,
        digest: bytes,
        asynchronous: bool,
        close_after: float,
        closed: Collection[int],
        left: Collection[int],
        tell: Callable[[Topic, int], None],
        forget: Callable[[int, int], None],
        send_again: Callable[[int], None],
    ):
        self.names, self.client, self.neighbors, self.digest = names, client, neighbors, digest
        self.asynchronous, self.close_after = asynchronous, close_after
        self.closed, self.left, self.leaving = frozenset(closed), frozenset(left), frozenset(left)
        self._tell, self._forget, self._send_again = tell, forget, send_again
        self.departure = Departure.NO
        self.incarnation = secrets.randbits(63)
        self.needed = 0  # the first step of which messages are needed
        self.failure: str | None = None
        self._finished, self._finished_before, self._finished_in = False, False, frozenset[int]()
        for place in self.left & set(neighbors):
            neighbors[place].done = True

    def message(self, topic: Topic, place: int, step: int = 0) -> ControlMessage:
        """What to say to a neighbor."""
        known = self.neighbors[place].incarnation
        said = self.departure, step, self.incarnation, known, self.digest, self.closed, self.left
        return ControlMessage(topic, *said)

    # ------------------------------------------------------------------ what is heard

    def hear(self, place: int, said: ControlMessage) -> None:
        """Take in what a neighbor says; raises `Rejected`."""
        if (said.closed or said.left or said.departure) and not self.asynchronous:
            raise Rejected(RefusalReason.BAD_CONTROL, "it removes peers, or lets them leave, in step")
        if said.topic != Topic.HELLO and said.digest != self.digest:
            raise Rejected(RefusalReason.BAD_CONTROL, "it is of another configuration")
        if said.topic in (Topic.HEARTBEAT, Topic.WAITING):
            return self._hear_heartbeat(place, said)
        other = self.neighbors[place]
        other.last_seen = time.monotonic()
        if said.digest != self.digest:
            ours, theirs = (f"{digest.hex()[:16]}…" for digest in (self.digest, said.digest))
            self.failure = f"{other.name} holds another configuration, {theirs}, than {self.names[self.client]}, {ours}"
            self._answer(place, said)  # let it know too: its own error names both
        elif place in self.closed:  # it is told so, and what it says of others is of its own side of a split
            if said.topic == Topic.HELLO:
                other.incarnation = said.incarnation
                self._answer(place, said)
        else:
            self._hear_members(place, said)
            if said.topic == Topic.HELLO:
                self._hear_hello(place, other, said)
            elif said.topic == Topic.ACKNOWLEDGE:
                self._forget(place, said.step)
            elif said.topic == Topic.DONE:  # done among others than those we know of is not done
                other.done, other.done_since = said.closed == self.closed, time.monotonic()
        return None

    def _hear_members(self, place: int, said: ControlMessage) -> None:
        self._note_closed(said.closed, self.neighbors[place].name)
        if said.departure:
            self.leaving = self.leaving | {place}
        self._note_left(said.left | ({place} if said.departure == Departure.LEFT else frozenset()))

    def _hear_hello(self, place: int, other: Neighbor, said: ControlMessage) -> None:
        if other.incarnation != said.incarnation:
            other.incarnation, other.done, other.step = said.incarnation, place in self.left, -1
            other.come_to(said.step)
            other.deadline.forget()
        self._answer(place, said)
        other.agreed = True
        self._forget(place, said.step)
        self._send_again(place)
        if self._finished:
            self._tell(Topic.DONE, place)

    def _answer(self, place: int, said: ControlMessage) -> None:
        if said.known != self.incarnation:  # it has not heard from this process yet
            self._tell(Topic.HELLO, place)

    def hear_life(self, place: int, alive: bool) -> None:
        """A neighbor has come, or gone."""
        other, now = self.neighbors[place], time.monotonic()
        other.alive = alive
        if alive:
            other.lost, other.last_seen = math.inf, now
            self._tell(Topic.HELLO, place)
        else:
            other.lost = now

    def heartbeat(self, place: int, rounds: Rounds) -> ControlMessage:
        """How far this peer is and how fast, for a neighbor."""
        said = self.message(Topic.WAITING if rounds.waits else Topic.HEARTBEAT, place, max(rounds.step, 0))
        return replace(said, pace=rounds.pace, sent=microseconds(), echo=self.neighbors[place].deadline.echo)

    def _hear_heartbeat(self, place: int, said: ControlMessage) -> None:
        """Take in how far a neighbor is and how fast."""
        other = self.neighbors[place]
        if (said.incarnation, said.known) != (other.incarnation, self.incarnation) or place in self.closed:
            return  # of or for a process that is gone, or who is out
        other.last_seen = time.monotonic()
        other.deadline.hear(said.pace, said.sent, said.echo)
        if said.topic == Topic.WAITING:
            other.advanced = time.monotonic()
        if said.pace:
            other.come_to(said.step)

    # ------------------------------------------------------------------ what is decided

    def absent(self) -> list[str]:
        """Who has not said hello."""
        # A hello may be read after the news that its sender has died: only liveliness says who lives.
        return [
            other.name
            for place, other in self.neighbors.items()
            if not (other.agreed and other.alive) and place not in self.closed | self.left
        ]

    def excuse_absent(self) -> None:
        """Who is not there has all of `close_after` from now on."""
        for other in self.neighbors.values():
            other.lost = math.inf if other.alive else time.monotonic()

    def finish(self, finished: bool, again: bool, view: frozenset[int]) -> None:
        """See `Members.done`."""
        self._finished, self._finished_before, self._finished_in = finished, again, view
        for place in self.neighbors if finished else ():
            self._tell(Topic.DONE, place)

    @property
    def says_done(self) -> bool:
        """Whether it is true in this view that this peer is done."""
        return self._finished and self._finished_in == self.closed

    @property
    def unfinished(self) -> list[str]:
        """Who is not done, of those who are not removed."""
        return [other.name for place, other in self.neighbors.items() if not other.done and place not in self.closed]

    def leave(self, left: bool) -> None:
        """See `Members.leave`."""
        self.departure = Departure.LEFT if left else Departure.LEAVING
        self._tell_members()

    def remove_gone(self) -> None:
        """Remove whoever is gone for too long, and tell the others."""
        now, gone = time.monotonic(), set[int]()
        for place, other in self.neighbors.items() if self.asynchronous else ():
            if self._may_be_gone(place, other) or now - other.lost <= self.close_after:
                continue
            if self._finished_before and not other.incarnation:  # it has heard that we are done, and ended
                other.done = True
            else:
                gone.add(place)
        self._note_closed(gone, self.names[self.client])

    def remove_stalled(self, behind: Collection[int], patience: float) -> None:
        """Remove who is there, waits for nobody, and has not come further for `patience` seconds."""
        now = time.monotonic()
        stalled = [place for place in behind if self.neighbors[place].alive]
        gone = [place for place in stalled if now - self.neighbors[place].advanced > patience]
        self._note_closed(gone, self.names[self.client])

    def missing(self) -> bool:
        """See `Members.missing`."""
        return any(not (other.alive or self._may_be_gone(place, other)) for place, other in self.neighbors.items())

    def present(self, clients: list[int]) -> list[int]:
        """See `Members.present`."""
        here = {place for place, other in self.neighbors.items() if other.alive} - self.closed - self.left
        return [client for client in clients if client in here]

    def takes_part(self, place: int) -> bool:
        """Whether a neighbor goes through the program, or will when it comes back."""
        return not self.neighbors[place].done and place not in self.closed | self.leaving

    def is_hopeless(self, place: int) -> bool:
        """Whether nothing is to be waited for from a neighbor, asynchronously."""
        other = self.neighbors[place]
        return place in self.closed or not other.alive or other.done

    def behind(self, step: int) -> list[int]:
        """Who is more than LEAD rounds behind, away or not: whoever runs away from it would push away all its mass."""
        if step >= LAST:
            return []
        return [p for p, other in self.neighbors.items() if other.step < step - LEAD and self.takes_part(p)]

    def _may_be_gone(self, place: int, other: Neighbor) -> bool:
        """Whether somebody may be gone for good and is not to be removed; who is done does not end before we are."""
        return place in self.closed or place in self.left or (other.done and self._finished)

    def _note_closed(self, gone: Collection[int], by: str) -> None:
        new = set(gone) - self.closed
        if not new:
            return
        if self.client in new:
            self.failure = f"removed by {by}: the others have continued without this peer"
            new.discard(self.client)
        self.closed = self.closed | new
        for place, other in self.neighbors.items():
            other.done, other.advanced = place in self.left, time.monotonic()
        self._tell_members()

    def _note_left(self, gone: Collection[int]) -> None:
        new = set(gone) - self.left - {self.client}
        if not new:
            return
        self.left, self.leaving = self.left | new, self.leaving | new
        for place in new & set(self.neighbors):
            self.neighbors[place].done = True
        self._tell_members()  # who was away when they left, and comes back, must not close them out

    def _tell_members(self) -> None:
        for place in self.neighbors:
            if place not in self.closed:
                self._tell(Topic.MEMBERS, place)
