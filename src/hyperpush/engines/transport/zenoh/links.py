"""One link of a peer: messages sent that may be needed again, and messages that wait for their step."""

from collections.abc import Callable
from typing import final

from hyperpush.engines.transport.retransmission import Payload, Unacknowledged
from hyperpush.engines.transport.wire import RefusalReason
from hyperpush.engines.transport.zenoh.parts import Assembly

# Largest number of messages of one sender that wait for their step; times the longest message, the limit of their
# bytes. A synchronous sender is at most a few rounds ahead, unless it hears no peer for some rounds. An asynchronous
# one is at most LEAD rounds ahead. A dropped message is sent again, or its total comes with the next one.
WINDOW = 64


@final
class Link:
    """Messages to and from one neighbor.

    Args:
        limit: Largest size of a payload in bytes.
        in_step: True for synchronous links: a message counts only in its step, and is sent again to a restarted peer.
        drop: Called with the reason when a message is dropped.
    """

    def __init__(self, limit: int, in_step: bool, drop: Callable[[RefusalReason], None] = lambda reason: None):
        self.in_step, self._drop = in_step, drop
        self.assembly = Assembly(limit, drop)
        self.mail: list[tuple[int, Payload]] = []
        self.newest = -1  # newest step of an arrived message
        self.lacks: int | None = None  # first step whose message was dropped and must be requested again; None: none
        self.unacknowledged = Unacknowledged()

    def add(self, header: bytes, part: bytes, needed: int) -> int | None:
        """Receive a part. Return the step of the payload that it completes, or None. Ignore known payloads."""
        complete = self.assembly.add(header, part)
        if complete is None:
            return None
        step, _ = complete
        if self.in_step and (step < needed or complete in self.mail):
            return None
        self.mail.append(complete)
        if len(self.mail) > WINDOW or self.waiting > WINDOW * self.assembly.limit:
            self._drop_one()
        self.newest = max(self.newest, step)
        return step

    @property
    def waiting(self) -> int:
        """Bytes of messages that wait for their step."""
        return sum(len(payload) for _, payload in self.mail)

    def _drop_one(self) -> None:
        """Drop the message of the latest step; asynchronously, the oldest total, which the newest one contains."""
        steps = [step for step, _ in self.mail]
        place = steps.index(max(steps)) if self.in_step else 0
        step, _ = self.mail.pop(place)
        if self.in_step:
            self.lacks = step if self.lacks is None else min(self.lacks, step)
        self._drop(RefusalReason.OVERFLOW)

    def asks_again(self, step: int) -> bool:
        """Return True, once, if a dropped message is due; its sender still has it."""
        if self.lacks is None or self.lacks > step or self.has(step):
            return False
        self.lacks = None
        return True

    def has(self, step: int) -> bool:
        """Return True if the message of a step has arrived; asynchronously, also if a later one has."""
        return any(at == step for at, _ in self.mail) if self.in_step else self.newest >= step

    def take(self, step: int) -> list[Payload]:
        """Return synchronous messages of `step`, or all asynchronous messages in the order of steps."""
        due = sorted((mail for mail in self.mail if mail[0] <= step or not self.in_step), key=lambda mail: mail[0])
        self.mail = [mail for mail in self.mail if mail[0] > step and self.in_step]
        return [payload for at, payload in due if at == step or not self.in_step]
