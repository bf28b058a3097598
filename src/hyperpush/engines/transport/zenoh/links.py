"""One link of a peer: messages sent that may be needed again, and messages that wait for their step."""

from collections.abc import Callable
from typing import final

from hyperpush.engines.transport.retransmission import Payload, Unacknowledged
from hyperpush.engines.transport.wire import RefusalReason
from hyperpush.engines.transport.zenoh.parts import Assembly

# Messages of one sender that may wait for their step, and, times the longest message of the program, their bytes. In
# step, a sender is a few rounds ahead at most, unless it hears nobody for some rounds. At its own pace it is LEAD
# rounds ahead at most. A message that is dropped is sent again, or its total comes with the next one.
WINDOW = 64


@final
class Link:
    """Messages to one neighbor, and from it.

    Args:
        limit: Bytes of the longest payload.
        in_step: True if a message counts in its own step only, and is sent again to a neighbor that comes back.
        drop: Counts a message that is given up.
    """

    def __init__(self, limit: int, in_step: bool, drop: Callable[[RefusalReason], None] = lambda reason: None):
        self.in_step, self._drop = in_step, drop
        self.assembly = Assembly(limit, drop)
        self.mail: list[tuple[int, Payload]] = []
        self.newest = -1  # step of which something has come
        self.lacks: int | None = None  # the first step whose message was dropped and has to be asked for again
        self.unacknowledged = Unacknowledged()

    def add(self, header: bytes, part: bytes, needed: int) -> int | None:
        """Take a part; the step of the payload that it completes. A payload that is known already is ignored."""
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
        """Bytes that wait for their step."""
        return sum(len(payload) for _, payload in self.mail)

    def _drop_one(self) -> None:
        """Drop the message of the furthest step; at one's own pace, the oldest total, which the newest one contains."""
        steps = [step for step, _ in self.mail]
        place = steps.index(max(steps)) if self.in_step else 0
        step, _ = self.mail.pop(place)
        if self.in_step:
            self.lacks = step if self.lacks is None else min(self.lacks, step)
        self._drop(RefusalReason.OVERFLOW)

    def asks_again(self, step: int) -> bool:
        """True once if a message that was dropped has its turn: its sender still has it."""
        if self.lacks is None or self.lacks > step or self.has(step):
            return False
        self.lacks = None
        return True

    def has(self, step: int) -> bool:
        """True if the message of a step has come or never will: at its own pace, a sender's newest one is enough."""
        return any(at == step for at, _ in self.mail) if self.in_step else self.newest >= step

    def take(self, step: int) -> list[Payload]:
        """Messages of `step` if peers are in step; else all messages, in the order of steps."""
        due = sorted((mail for mail in self.mail if mail[0] <= step or not self.in_step), key=lambda mail: mail[0])
        self.mail = [mail for mail in self.mail if mail[0] > step and self.in_step]
        return [payload for at, payload in due if at == step or not self.in_step]
