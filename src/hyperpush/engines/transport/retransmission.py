"""When messages are sent again, and how long they are kept for it: every timeout and rule of retransmission.

- In step (synchronously), a sender keeps each message until the receiver acknowledges it (`Unacknowledged`).
  It is sent again only to a receiver that was restarted: the network below, TCP, loses nothing in between.
- At one's own pace (asynchronously), nothing is kept. Each round sends the total of all that was ever put on a link,
  and so makes up for all messages that were lost before.
- At the end of a run no round follows. Totals that nobody has acknowledged are sent again with growing pauses
  (`Backoff`).
"""

import time
from collections import deque
from typing import final

# A message and its acknowledgment take a few milliseconds within a site and up to 0.3 s around the world. So the first
# pause seldom sends anything twice nearby. Five doublings later, a second, it costs a slow link next to nothing.
FIRST_RESEND, LONGEST_RESEND = 0.05, 1.0  # seconds
# Steps between two acknowledgments of a synchronous receiver without checkpoints. More saves messages, and makes every
# sender keep as many more of its own.
ACKNOWLEDGE_EVERY = 8

Payload = bytes | bytearray


@final
class Backoff:
    """When to send again what nobody has acknowledged: at once, then after pauses that double up to the longest."""

    def __init__(self) -> None:
        self._due, self._pause = 0.0, FIRST_RESEND

    def is_due(self) -> bool:
        """Whether it is time to send again; if so, the next pause begins."""
        now = time.monotonic()
        if now < self._due:
            return False
        self._due, self._pause = now + self._pause, min(2 * self._pause, LONGEST_RESEND)
        return True


@final
class Unacknowledged:
    """What was sent to one receiver and may have to be sent again, oldest first."""

    def __init__(self) -> None:
        self._kept: deque[tuple[int, Payload]] = deque()

    def keep(self, step: int, payload: Payload) -> None:
        """Keep the message of a step until it is acknowledged."""
        self._kept.append((step, payload))

    def acknowledge(self, step: int) -> None:
        """Forget what was sent before `step`: the receiver needs none of it again."""
        while self._kept and self._kept[0][0] < step:
            self._kept.popleft()

    def to_resend(self) -> list[tuple[int, Payload]]:
        """(step, payload) of all that is kept."""
        return list(self._kept)
