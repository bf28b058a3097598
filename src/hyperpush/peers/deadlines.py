"""How long to wait for a neighbour: as long as it needs for a round and its message for the way.

Waits are not learned from waits. Who waits in vain for a message that was lost sends its own late; whoever waits for it
would take it for slow and wait longer in vain itself, and so on up to the longest wait. So a peer says how long rounds
take it without its waits, and an echo says how long the way is: neither depends on how long anybody waits, on losses or
on messages that are late.
"""

from collections import deque
from typing import final

REMEMBERED = 16
MARGIN = 1.5


@final
class Typical:
    """A duration that is seldom exceeded: of the last ones, the longest but one. One round may have been compiled."""

    def __init__(self) -> None:
        self._last: deque[float] = deque(maxlen=REMEMBERED)

    def add(self, seconds: float) -> None:
        """One more was that long."""
        self._last.append(seconds)

    @property
    def seconds(self) -> float | None:
        return sorted(self._last)[-2:][0] if self._last else None


@final
class Deadline:
    """Of one link, in seconds, between `least` and `most`; before both parts of it are known, `most`."""

    def __init__(self, least: float = 0.002, most: float = 2.0):
        self.least, self.most = least, most
        self.pace: float | None = None  # what a round takes the neighbour
        self.way = Typical()  # there and back

    @property
    def known(self) -> bool:
        return self.pace is not None and self.way.seconds is not None

    @property
    def seconds(self) -> float:
        way = self.way.seconds
        if self.pace is None or way is None:
            return self.most
        return min(max(MARGIN * (self.pace + way), self.least), self.most)
