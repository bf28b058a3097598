"""Membership of a run: what a peer knows about its neighbors, and what it decides about them.

This module contains only the rules: it sends nothing itself and never waits. Its functions are called with the
transport's lock held.
"""

import math
import secrets
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import final

from hyperpush.base.errors import Absent, HyperpushError, InUse, Refused
from hyperpush.engines.transport.protocol import LAST, LEAD
from hyperpush.engines.transport.wire import RefusalReason, Rejected
from hyperpush.engines.transport.zenoh.agreement import difference
from hyperpush.engines.transport.zenoh.control import NO_CARD, Accusation, Card, ControlMessage, Departure, Topic
from hyperpush.engines.transport.zenoh.deadlines import Rounds, microseconds
from hyperpush.engines.transport.zenoh.neighbors import Neighbor, Refusal, certificate_ended
from hyperpush.engines.transport.zenoh.parts import RUN_BYTES

# Number of messages with invalid content after which an asynchronous member is removed. One may come from a broken disk
# or a flipped bit, but not three.
REFUSALS = 3
# Seconds for which a neighbor must address another process under this peer's name before this process ends. On a busy
# machine messages may be that late.
OVERTAKEN = 3.0


@final
class Membership:
    """The state of all members of a run: which are present, done, leaving, gone or removed.

    Args:
        names: All peers of the run, in the order of their clients.
        client: The number of this peer.
        neighbors: The peers that this peer exchanges messages with, by client.
        asynchronous: True if peers may vanish, leave and be removed.
        close_after: Seconds after which an absent peer is removed.
        closed: Peers that were removed before this process started.
        left: Peers that had left before this process started.
        tell: Function that sends a control message, given its topic and a neighbor.
        forget: Function called with a neighbor and the first step of which the neighbor may still need messages.
        send_again: Function that repeats the unacknowledged messages to a neighbor.
        run: The digest that identifies the run in every message.
        card: This peer's card; peers with other cards are refused.
        resumed: True if this process may continue from an earlier one's checkpoint; False for a fresh start.
    """

    def __init__(
        self,
        names: Sequence[str],
        client: int,
        neighbors: Mapping[int, Neighbor],
        *,
        asynchronous: bool,
        close_after: float,
        closed: Collection[int],
        left: Collection[int],
        tell: Callable[[Topic, int], None],
        forget: Callable[[int, int], None],
        send_again: Callable[[int], None],
        run: bytes = bytes(RUN_BYTES),
        card: Card = NO_CARD,
        resumed: bool = True,
    ):
        self.names, self.client, self.neighbors = names, client, neighbors
        self.run, self.card, self.resumed = run, card, resumed
        self.asynchronous, self.close_after = asynchronous, close_after
        self.closed, self.left, self.leaving = frozenset(closed), frozenset(left), frozenset(left)
        self._tell, self._forget, self._send_again = tell, forget, send_again
        self.departure = Departure.NO
        self.incarnation = secrets.randbits(63)
        self.returned = False  # True if this process continues from a checkpoint
        self.needed = 0  # first step of which messages are needed
        self.failure: HyperpushError | None = None
        self.news: deque[str] = deque(maxlen=100)  # lines to show to the user
        self._accused: tuple[Accusation, int] | None = None
        self._finished, self._finished_before, self._finished_in = False, False, frozenset[int]()
        for place in self.left & set(neighbors):
            neighbors[place].done = True
        for place in self.closed & set(neighbors):
            neighbors[place].removed = f"{names[place]} was removed before this process started"

    @property
    def name(self) -> str:
        """This peer's name."""
        return self.names[self.client]

    def message(self, topic: Topic, place: int, step: int = 0) -> ControlMessage:
        """Return a control message on a topic, addressed to a neighbor."""
        other = self.neighbors[place]
        known = other.heard if topic == Topic.HELLO else other.incarnation
        said = self.departure, step, self.incarnation, known, self.run, self.closed, self.left
        if topic == Topic.ENDED and self._accused is not None:
            accusation, at = self._accused
            return replace(ControlMessage(topic, *said, more=accusation), step=at)
        if topic == Topic.HELLO:
            return ControlMessage(topic, *said, pace=int(self.resumed), more=self.card)
        return ControlMessage(topic, *said)

    def fail(self, error: HyperpushError) -> None:
        """End the run of this peer because of `error`, unless an earlier error has ended it."""
        self.failure = self.failure or error

    # ------------------------------------------------------------------ hearing

    def hear(self, place: int, said: ControlMessage) -> None:
        """Receive a control message of a neighbor; raise `Rejected` if it is invalid."""
        other = self.neighbors[place]
        if (said.closed or said.left or said.departure) and not self.asynchronous:
            raise Rejected(RefusalReason.BAD_CONTROL, "it removes peers, or lets them leave, in synchronous mode")
        if isinstance(said.more, Card):
            self._check_card(place, said, said.more)
        elif said.run != self.run:
            raise Rejected(RefusalReason.ANOTHER_RUN, f"{other.name} sent it for another run")
        if said.topic in (Topic.HEARTBEAT, Topic.WAITING):
            return self._hear_heartbeat(place, said)
        if said.topic != Topic.HELLO:
            self.check_incarnation(place, said.incarnation)
            self._check_place(other, said)
        other.last_seen = time.monotonic()
        if place in self.closed:
            # Answer, so that the peer learns of its removal. Ignore its view of other members: the network was split.
            if said.topic == Topic.HELLO:
                self._hear_hello(place, said)
            return None
        if said.topic != Topic.HELLO or self._is_answer(said):
            self._hear_members(place, said)
        if said.topic == Topic.HELLO:
            self._hear_hello(place, said)
        elif said.topic == Topic.ACKNOWLEDGE:
            self._forget(place, said.step)
        elif said.topic == Topic.DONE:  # valid only if both peers know the same removed members
            other.done, other.done_since = said.closed == self.closed, time.monotonic()
            other.note_end()
        elif isinstance(said.more, Accusation):
            self._hear_accusation(other, said.step, said.more)
        return None

    def check_incarnation(self, place: int, incarnation: int) -> None:
        """Raise `Rejected` for a message of another process than the accepted one of this neighbor."""
        other = self.neighbors[place]
        if incarnation == other.incarnation:
            return
        if incarnation in other.former and time.monotonic() - other.told > 1.0:
            other.told = time.monotonic()  # the former process may still run, without knowing of its successor
            self._tell(Topic.MEMBERS, place)
        raise Rejected(RefusalReason.ANOTHER_INCARNATION, f"another process of {other.name} has sent it")

    def _check_card(self, place: int, said: ControlMessage, card: Card) -> None:
        """Raise `Rejected` for a peer with another card. End this peer, too, if it has not accepted any other yet."""
        other, found = self.neighbors[place], difference(self.names[place], card, self.name, self.card)
        if found is None:
            return
        reason, words = found
        other.note_unfit(words)
        if other.answered != said.incarnation:  # send this peer's card, so that the neighbor's error names both
            other.answered, other.heard = said.incarnation, said.incarnation
            self._tell(Topic.HELLO, place)
            self.news.append(f"refused: {words}")
        if not any(each.agreed for each in self.neighbors.values()):
            self.fail(HyperpushError(words))
        raise Rejected(reason, words)

    def _check_place(self, other: Neighbor, said: ControlMessage) -> None:
        """End this process if a neighbor has since accepted another process under this peer's name."""
        now = time.monotonic()
        if said.known == self.incarnation:
            other.knows, other.strange_since = True, math.inf
        elif said.known and other.knows:
            # Control messages and heartbeats overtake each other, so those for the former process may arrive late.
            other.strange_since = min(other.strange_since, now)
            if now - other.strange_since > OVERTAKEN:
                said_so = f"{other.name} has accepted that process"
                self.fail(InUse(f"another process has taken the place of {self.name}: {said_so}"))

    def _is_answer(self, said: ControlMessage) -> bool:
        """Return True for a hello that answers one of this process; any other hello may be recorded and replayed."""
        return said.known == self.incarnation

    def _hear_members(self, place: int, said: ControlMessage) -> None:
        self._note_closed(said.closed, self.neighbors[place].name)
        if said.departure:
            self.leaving = self.leaving | {place}
        self._note_left(said.left | ({place} if said.departure == Departure.LEFT else frozenset()))

    def _hear_hello(self, place: int, said: ControlMessage) -> None:
        """Accept a process once it has answered this one. Before that, its hello may be recorded and replayed."""
        other, card = self.neighbors[place], said.more
        assert isinstance(card, Card)
        if said.incarnation in other.former:
            self.check_incarnation(place, said.incarnation)
        if said.incarnation not in (0, other.incarnation) and other.incarnation and not said.resumed:
            self._check_fresh(other)
        other.heard = said.incarnation
        if not self._is_answer(said):
            return self._tell(Topic.HELLO, place)
        other.unfit = ""
        other.meet(card)
        if other.incarnation != said.incarnation:
            other.adopt(said.incarnation, card, said.step, place in self.left)
            if other.token and not (other.alive or other.expired) and other.come_to_life():
                self.news.append(f"found: {other.name}")
            self._tell(Topic.HELLO, place)
        if place in self.closed:
            return None
        other.agreed = True
        self._forget(place, said.step)
        self._send_again(place)
        if self._finished:
            self._tell(Topic.DONE, place)
        return None

    def _check_fresh(self, other: Neighbor) -> None:
        """Raise `Rejected` for a fresh start during a run, which cannot undo what the earlier process has sent.

        If both peers were done, the fresh start belongs to the next call of the same program, and is also rejected:
        messages of the two calls must not be confused.
        """
        if other.sent_data or (self._finished and other.done):
            other.anew = True
            words = f"a process of {other.name} has started anew, without the checkpoint of the one before"
            raise Rejected(RefusalReason.ANOTHER_INCARNATION, words)

    def hear_life(self, place: int, alive: bool) -> None:
        """Note that the presence token of a neighbor has appeared or vanished."""
        other = self.neighbors[place]
        other.token = alive
        if not alive:
            return other.get_lost()
        if other.expired:  # a new process with a new certificate may have taken the neighbor's place
            return self._tell(Topic.HELLO, place)
        if other.come_to_life():
            self.news.append(f"found: {other.name}")
        return self._tell(Topic.HELLO, place)

    def check_certificates(self) -> None:
        """End this peer if its certificate has ended. Neighbors whose certificate has ended become absent."""
        if ended := certificate_ended(self.name, self.card.ends):
            self.fail(Absent(f"{ended}, and its links with it"))
        for other in self.neighbors.values():
            if other.alive and other.expired:
                other.get_lost()

    def look_for_lost(self) -> None:
        """Report neighbors that were lost to the user, except those that were done."""
        for other in self.neighbors.values():
            if other.is_lost():
                self.news.append(f"lost: {other.name}")

    # ------------------------------------------------------------------ refusals

    def refuse(self, place: int, reason: RefusalReason, step: int) -> None:
        """Count a refused message of a neighbor. `Members.refuse` says what follows from invalid content."""
        other = self.neighbors[place]
        if other.refuse(reason, step):
            self.news.append(Refusal(step, reason).of(other.name))
        if not reason.of_content or place in self.closed:
            return
        if not self.asynchronous:
            self._accused = Accusation(place, reason), step
            self.fail(Refused(Refusal(step, reason).of(other.name)))
            for each in self.neighbors:
                self._tell(Topic.ENDED, each)
        elif other.contents_refused >= REFUSALS:
            other.blamed, other.removed = True, Refusal(step, reason).of(other.name)
            self._note_closed({place}, self.name)

    def _hear_accusation(self, other: Neighbor, step: int, said: Accusation) -> None:
        """End this peer because a neighbor has ended, after that neighbor refused a member's message."""
        words = Refusal(step, said.reason).of(self.names[said.member])
        other.farewell = f"{other.name} has ended: {words}"
        self.fail(Refused(other.farewell))

    def heartbeat(self, place: int, rounds: Rounds) -> ControlMessage:
        """Return a heartbeat for a neighbor, with this peer's step and round time."""
        said = self.message(Topic.WAITING if rounds.waits else Topic.HEARTBEAT, place, max(rounds.step, 0))
        return replace(said, pace=rounds.pace, sent=microseconds(), echo=self.neighbors[place].deadline.echo)

    def _hear_heartbeat(self, place: int, said: ControlMessage) -> None:
        """Receive a heartbeat with a neighbor's step and round time."""
        other = self.neighbors[place]
        if said.incarnation != other.incarnation or place in self.closed:
            return  # from a former process, or from a removed peer
        self._check_place(other, said)
        if said.known != self.incarnation:
            return
        other.last_seen = time.monotonic()
        other.deadline.hear(said.pace, said.sent, said.echo)
        if said.topic == Topic.WAITING:
            other.advanced = time.monotonic()
        if said.pace:
            other.come_to(said.step)

    # ------------------------------------------------------------------ decisions

    def absent(self) -> list[Neighbor]:
        """Return neighbors that are absent or have not said hello, except those that were removed or have left."""
        # A hello may be read after its sender has died, so only Zenoh's presence token is reliable.
        return [
            other
            for place, other in self.neighbors.items()
            if not (other.agreed and other.alive) and place not in self.closed | self.left
        ]

    def excuse_absent(self) -> None:
        """Restart the time `close_after` for absent peers, because this process continues from a checkpoint."""
        self.returned = True
        for other in self.neighbors.values():
            other.lost = math.inf if other.alive else time.monotonic()

    def finish(self, finished: bool, again: bool, view: frozenset[int]) -> None:
        """See `Members.done`."""
        self._finished, self._finished_before, self._finished_in = finished, again, view
        for place in self.neighbors if finished else ():
            self._tell(Topic.DONE, place)

    @property
    def says_done(self) -> bool:
        """True if this peer is done and no member was removed since."""
        return self._finished and self._finished_in == self.closed

    @property
    def unfinished(self) -> list[Neighbor]:
        """Neighbors that are neither done nor removed."""
        return [other for place, other in self.neighbors.items() if not other.done and place not in self.closed]

    def leave(self, left: bool) -> None:
        """See `Members.leave`."""
        self.departure = Departure.LEFT if left else Departure.LEAVING
        self._tell_members()

    def remove_gone(self) -> None:
        """Remove members that have been absent for more than `close_after` seconds, and inform all others."""
        now, gone = time.monotonic(), set[int]()
        for place, other in self.neighbors.items() if self.asynchronous else ():
            if self._may_be_gone(place, other) or now - other.lost <= self.close_after:
                continue
            if self._finished_before and not other.incarnation:  # it has ended, because it knew that this peer was done
                other.done = True
            else:
                other.removed = other.removed or f"{other.name} was absent for {self.close_after:g} s"
                gone.add(place)
        if gone and self.returned and not any(other.incarnation for other in self.neighbors.values()):
            said = f"no peer answered for {self.close_after:g} s since this one returned: all others have ended or are"
            return self.fail(Absent(f"{said} absent; its checkpoint stays, and its own data alone make no result"))
        return self._note_closed(gone, self.name)

    def remove_stalled(self, behind: Collection[int], patience: float) -> None:
        """Remove members of `behind` that are present, but have neither advanced nor waited for `patience` seconds."""
        now = time.monotonic()
        stalled = [place for place in behind if self.neighbors[place].alive]
        gone = [place for place in stalled if now - self.neighbors[place].advanced > patience]
        for other in (self.neighbors[place] for place in gone):
            other.removed = f"{other.name} was here, in step {other.step}, and did not advance for {patience:g} s"
        self._note_closed(gone, self.name)

    def missing(self) -> bool:
        """See `Members.missing`."""
        return any(not (other.alive or self._may_be_gone(place, other)) for place, other in self.neighbors.items())

    def present(self, clients: list[int]) -> list[int]:
        """See `Members.present`."""
        here = {place for place, other in self.neighbors.items() if other.alive} - self.closed - self.left
        return [client for client in clients if client in here]

    def takes_part(self, place: int) -> bool:
        """Return True if a neighbor is still running the program, or will be when it returns."""
        return not self.neighbors[place].done and place not in self.closed | self.leaving

    def is_hopeless(self, place: int) -> bool:
        """Return True if an asynchronous peer need not wait for a neighbor: it is removed, absent or done."""
        other = self.neighbors[place]
        return place in self.closed or not other.alive or other.done

    def behind(self, step: int) -> list[int]:
        """Return the neighbors more than LEAD rounds behind, present or absent.

        A peer that ran further ahead of them would push away all its mass.
        """
        if step >= LAST:
            return []
        return [p for p, other in self.neighbors.items() if other.step < step - LEAD and self.takes_part(p)]

    def _may_be_gone(self, place: int, other: Neighbor) -> bool:
        """Return True if a neighbor may be absent for good without a removal.

        A neighbor that is done does not end before this peer is done.
        """
        return place in self.closed or place in self.left or (other.done and self._finished)

    def _note_closed(self, gone: Collection[int], by: str) -> None:
        new = set(gone) - self.closed
        if not new:
            return
        if self.client in new:
            self.fail(Absent(f"removed by {by}: the others have continued without this peer"))
            new.discard(self.client)
        self.closed = self.closed | new
        for other in (self.neighbors[each] for each in new if each in self.neighbors):
            other.removed = other.removed or f"{other.name} was removed by {by}"
        self.news.extend(f"removed: {self.names[each]}, by {by}" for each in sorted(new))
        for place, other in self.neighbors.items():
            other.done, other.advanced = place in self.left, time.monotonic()
        self._tell_members()
        for place in new & set(self.neighbors):  # a removed peer that is present ends, instead of continuing alone
            self._tell(Topic.MEMBERS, place)

    def _note_left(self, gone: Collection[int]) -> None:
        new = set(gone) - self.left - {self.client}
        if not new:
            return
        self.left, self.leaving = self.left | new, self.leaving | new
        for place in new & set(self.neighbors):
            self.neighbors[place].done = True
        self._tell_members()  # a peer that was absent at that time must not remove them when it returns

    def _tell_members(self) -> None:
        for place in self.neighbors:
            if place not in self.closed:
                self._tell(Topic.MEMBERS, place)
