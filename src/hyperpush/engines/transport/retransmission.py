"""Rules and timeouts for sending messages again.

- Synchronously, a sender keeps each message until the receiver acknowledges it (`Unacknowledged`). It is sent again
  only to a receiver that was restarted, because TCP below loses nothing otherwise.
- Asynchronously, no message is kept. Each round sends the running total of a link, which replaces all messages that
  were lost before.
- At the end of a run no further round follows, so unacknowledged totals are sent again with growing pauses (`Backoff`).
"""

import time
from collections import deque
from typing import final

# A message and its acknowledgment take a few milliseconds within a site and up to 0.3 s around the world. So the first
# pause seldom causes a repetition within a site. After five doublings it is a second, a small load on a slow link.
FIRST_RESEND, LONGEST_RESEND = 0.05, 1.0  # seconds
# Steps between two acknowledgments of a synchronous receiver without checkpoints. A larger number saves messages, but
# makes senders keep more.
ACKNOWLEDGE_EVERY = 8

Payload = bytes | bytearray


@final
class Backoff:
    """Schedule for sending a message again: at once, then after pauses that double up to `LONGEST_RESEND`."""

    def __init__(self) -> None:
        self._due, self._pause = 0.0, FIRST_RESEND

    def is_due(self) -> bool:
        """Return True, and begin the next pause, if it is time to send again."""
        now = time.monotonic()
        if now < self._due:
            return False
        self._due, self._pause = now + self._pause, min(2 * self._pause, LONGEST_RESEND)
        return True


@final
class Unacknowledged:
    """Messages to one receiver that may have to be sent again, oldest first."""

    def __init__(self) -> None:
        self._kept: deque[tuple[int, Payload]] = deque()

    def keep(self, step: int, payload: Payload) -> None:
        """Keep the message of a step until it is acknowledged."""
        self._kept.append((step, payload))

    def acknowledge(self, step: int) -> None:
        """Forget messages of steps before `step`, which the receiver will not need again."""
        while self._kept and self._kept[0][0] < step:
            self._kept.popleft()

    def to_resend(self) -> list[tuple[int, Payload]]:
        """Return (step, payload) of all kept messages."""
        return list(self._kept)
