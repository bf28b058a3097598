"""One link of a peer: sent messages that may be needed again, and received messages that wait for their step."""

from collections.abc import Callable
from typing import final

from hyperpush.engines.transport.retransmission import Payload, Unacknowledged
from hyperpush.engines.transport.wire import RefusalReason
from hyperpush.engines.transport.zenoh.parts import PART_BYTES, Assembly

# Number of rounds, from the next one needed, whose messages are kept; asynchronously, the number of messages kept. A
# synchronous sender is a few rounds ahead. After a restart of the receiver, it repeats its messages since the
# receiver's last checkpoint. An asynchronous sender is at most LEAD rounds ahead, and sends a total and an
# acknowledgment in each.
WINDOW = 16
# Largest size of all waiting messages of one sender, in multiples of the program's longest message. It corresponds to
# the number of rounds that an honest sender is ahead. A dropped message is requested again when it is due; a dropped
# total is contained in the next one.
ROOM = 4
# Smallest limit in bytes for the waiting messages of one sender, so that a whole window of small messages fits.
SMALL = PART_BYTES


@final
class Link:
    """The link to one neighbor: messages sent to it and received from it.

    Args:
        limit: Largest size of a payload in bytes.
        in_step: True for synchronous links: a message counts only in its step, and is sent again to a restarted peer.
        drop: Called with the reason when a message is dropped.
    """

    def __init__(self, limit: int, in_step: bool, drop: Callable[[RefusalReason], None] = lambda reason: None):
        self.in_step, self._count = in_step, drop
        self.assembly = Assembly(limit, drop)
        self.mail: list[tuple[int, Payload]] = []
        self.newest = -1  # newest step of an arrived message
        self.lacks: int | None = None  # first step whose message was dropped and must be requested again; None: none
        self.unacknowledged = Unacknowledged()

    def add(self, header: bytes, part: bytes, needed: int) -> int | None:
        """Receive a part of a payload. Return the payload's step if it is complete and new, else None."""
        complete = self.assembly.add(header, part)
        if complete is None:
            return None
        step, _ = complete
        if self.in_step and (step < needed or complete in self.mail):
            return None
        if self.in_step and step > needed + WINDOW:
            self._drop(step)
            return None
        self.mail.append(complete)
        while len(self.mail) > WINDOW or self.waiting > self.room:
            self._drop_one()
        self.newest = max(self.newest, step)
        return step

    @property
    def room(self) -> int:
        """Limit in bytes for messages that wait for their step."""
        return max(ROOM * self.assembly.limit, SMALL)

    @property
    def waiting(self) -> int:
        """Size in bytes of the messages that wait for their step."""
        return sum(len(payload) for _, payload in self.mail)

    def _drop_one(self) -> None:
        """Drop the message of the latest step. Asynchronously, drop the oldest total, which newer ones contain."""
        steps = [step for step, _ in self.mail]
        place = steps.index(max(steps)) if self.in_step else 0
        step, _ = self.mail.pop(place)
        self._drop(step)

    def _drop(self, step: int) -> None:
        """Count a dropped message. Synchronously, note that it has to be requested again."""
        if self.in_step:
            self.lacks = step if self.lacks is None else min(self.lacks, step)
        self._count(RefusalReason.OVERFLOW)

    def asks_again(self, step: int) -> bool:
        """Return True, once, if a dropped message is due and must be requested again from its sender."""
        if self.lacks is None or self.lacks > step or self.has(step):
            return False
        self.lacks = None
        return True

    def has(self, step: int) -> bool:
        """Return True if the message of a step has arrived; asynchronously, also if a later one has."""
        return any(at == step for at, _ in self.mail) if self.in_step else self.newest >= step

    def take(self, step: int) -> list[Payload]:
        """Return the messages of `step`; asynchronously, all waiting messages in the order of steps."""
        due = sorted((mail for mail in self.mail if mail[0] <= step or not self.in_step), key=lambda mail: mail[0])
        self.mail = [mail for mail in self.mail if mail[0] > step and self.in_step]
        return [payload for at, payload in due if at == step or not self.in_step]
