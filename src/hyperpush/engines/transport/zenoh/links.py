"""One link of a peer: what was sent and may be sent again, and what has come and waits for its step."""

from typing import final

from hyperpush.engines.transport.retransmission import Payload, Unacknowledged
from hyperpush.engines.transport.wire import RefusalReason, Rejected
from hyperpush.engines.transport.zenoh.parts import Assembly

# Bytes of payloads of one sender that may wait for their step: four of the longest (`transport.LIMIT`). It bounds what
# a sender that is broken, or far ahead because it hears nobody, can make us hold.
HELD = 1 << 30


@final
class Link:
    """What was sent to one neighbor, and what has come from it.

    Args:
        limit: Bytes of the longest payload.
        in_step: Whether messages count in their own step only, and are sent again to a neighbor that comes back.
    """

    def __init__(self, limit: int, in_step: bool):
        self.in_step = in_step
        self.assembly = Assembly(limit)
        self.mail: list[tuple[int, Payload]] = []
        self.newest = -1  # step of which something has come
        self.unacknowledged = Unacknowledged()

    def add(self, header: bytes, part: bytes, needed: int) -> int | None:
        """Take a part; the step of the payload that it completes. What was sent again and is known is dropped."""
        complete = self.assembly.add(header, part)
        if complete is None:
            return None
        step, payload = complete
        if self.in_step and (step < needed or complete in self.mail):
            return None
        waiting = sum(len(each) for _, each in self.mail)
        if waiting + len(payload) > HELD:
            raise Rejected(RefusalReason.OVERFLOW, f"{waiting} bytes wait for their step")
        self.mail.append(complete)
        self.newest = max(self.newest, step)
        return step

    def has(self, step: int) -> bool:
        """Whether a message of that step has come, or will not: at its own pace, a sender's newest one is enough."""
        return any(at == step for at, _ in self.mail) if self.in_step else self.newest >= step

    def take(self, step: int) -> list[Payload]:
        """In step with each other, what is of `step`; else all that has come, in the order of steps."""
        due = sorted((mail for mail in self.mail if mail[0] <= step or not self.in_step), key=lambda mail: mail[0])
        self.mail = [mail for mail in self.mail if mail[0] > step and self.in_step]
        return [payload for at, payload in due if at == step or not self.in_step]
