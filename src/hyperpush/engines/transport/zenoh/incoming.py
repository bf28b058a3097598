"""Receive messages, links and signs of presence. Invalid ones are counted and otherwise ignored."""

import threading
import time
from collections import Counter
from collections.abc import Mapping
from typing import final

from hyperpush.engines.transport.wire import RefusalReason, Rejected
from hyperpush.engines.transport.zenoh.control import Card, unpack
from hyperpush.engines.transport.zenoh.endpoints import Take
from hyperpush.engines.transport.zenoh.guests import OTHERS, Guests
from hyperpush.engines.transport.zenoh.links import Link
from hyperpush.engines.transport.zenoh.membership import Membership
from hyperpush.engines.transport.zenoh.neighbors import certificate_ended, ended
from hyperpush.engines.transport.zenoh.parts import stamp_of


@final
class Incoming:
    """Callbacks that Zenoh's threads call; each takes the transport's lock.

    Args:
        members: The membership.
        links: Messages that have arrived, by neighbor.
        changed: The transport's lock.
    """

    def __init__(self, members: Membership, links: Mapping[int, Link], changed: threading.Condition):
        self.members, self.links, self._changed = members, links, changed
        self.rejections = Counter[str]()
        self._guests = Guests({name: place for place, name in enumerate(members.names)}, members.neighbors)

    def guard(self, take: Take) -> Take:
        """Return a callback that calls `take` with the lock held, and counts the messages that `take` rejects."""

        def handle(place: int, header: bytes, payload: bytes) -> None:
            with self._changed:
                try:
                    take(place, header, payload)
                except Rejected as rejected:
                    self._note(place, rejected)
                self._changed.notify_all()

        return handle

    def _check_certificate(self, place: int, renewed: bool = False) -> None:
        """Raise `Rejected` if the neighbor's certificate has ended. TLS does not verify resumed sessions again."""
        other = self.members.neighbors[place]
        if other.expired and not renewed:
            raise Rejected(RefusalReason.EXPIRED, certificate_ended(other.name, other.ends))

    def _note(self, place: int, rejected: Rejected) -> None:
        if rejected.reason == RefusalReason.WRONG_VERSION:
            other = self.members.neighbors[place]
            other.note_unfit(f"{other.name} has {rejected.detail}")
        self.count(place, rejected.reason)

    def count(self, place: int, reason: RefusalReason) -> None:
        """Count a message of a neighbor that was refused or dropped."""
        self.rejections[reason.value] += 1
        self.members.refuse(place, reason, self.members.needed)

    def on_data(self, place: int, header: bytes, part: bytes) -> None:
        """Receive a part of a message that a neighbor's program has sent."""
        self._check_certificate(place)
        other, stamp = self.members.neighbors[place], stamp_of(header)
        other.received_bytes += len(part)
        if stamp.run != self.members.run:
            raise Rejected(RefusalReason.ANOTHER_RUN, f"{other.name} sent it in another run")
        if not other.incarnation:  # the sender's hello is still missing; after it, the sender repeats this part
            other.early += 1
            return
        self.members.check_incarnation(place, stamp.incarnation)
        other.last_seen = time.monotonic()
        step = self.links[place].add(header, part, self.members.needed)
        if step is not None:
            other.sent_data = True
            other.come_to(step)

    def on_control(self, place: int, header: bytes, payload: bytes) -> None:
        """Receive a control message, which may be a heartbeat, from a neighbor."""
        if header:
            raise Rejected(RefusalReason.BAD_CONTROL, "it has an attachment")
        said = unpack(payload, len(self.members.names))
        self._check_certificate(place, renewed=isinstance(said.more, Card) and not ended(said.more.ends))
        self.members.hear(place, said)

    def on_life(self, place: int, alive: bool) -> None:
        """Note that the presence token of a neighbor has appeared or vanished."""
        with self._changed:
            self.members.hear_life(place, alive)
            self._changed.notify_all()

    def on_link(self, name: str | None, session: bytes, opened: bool) -> None:
        """Count a link whose certificate names no peer of the run, or a peer that says hello on another link."""
        with self._changed:
            if found := self._guests.note(name, session, opened):
                self._note_guest(str(name), found)

    def look_at_guests(self) -> None:
        """Count links that stayed open too long without a hello under their certificate's name."""
        for name in self._guests.look():
            self._note_guest(name, OTHERS)

    def _note_guest(self, name: str, reason: str) -> None:
        self.rejections[reason] += 1
        self.members.news.append(f"refused: a link with a certificate of {name} ({reason})")
