"""How long to wait for a neighbor: as long as it needs for a round and its message for the way.

Waits are not learned from waits. Who waits in vain for a message that was lost sends its own late; whoever waits for it
would take it for slow and wait longer in vain itself, and so on up to the longest wait. So peers tell each other how
far they are and how long a round takes them without their waits, and the answer to that says how long the way is:
neither depends on how long anybody waits for messages, on losses or on messages that are late.

Of a link at most one question is on its way, and answers carry the time at which the question was sent.
"""

import time
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
        self.forget()

    def forget(self) -> None:
        """Another process is at the other end."""
        self.pace: float | None = None  # what a round takes the neighbor
        self.way = Typical()  # there and back
        self._asked = float("-inf")
        self._open = False  # the answer has not come

    @property
    def known(self) -> bool:
        return self.pace is not None and self.way.seconds is not None

    @property
    def seconds(self) -> float:
        way = self.way.seconds
        if self.pace is None or way is None:
            return self.most
        return min(max(MARGIN * (self.pace + way), self.least), self.most)

    def due(self, every: float, now: float) -> bool:
        """Whether to ask now: `every` so often, but not while an answer may still come. If so, that is noted."""
        if now - self._asked < (max(every, self.most) if self._open else every):
            return False
        self._asked, self._open = now, True
        return True

    def hear(self, sent: int) -> None:
        """The answer to the question of that time has come."""
        self._open = False
        self.way.add(max(microseconds() - sent, 0) / 1e6)


@final
class Rounds:
    """How far this peer is, and how long rounds take it without its waits."""

    def __init__(self) -> None:
        self.step = -1
        self.typical = Typical()
        self._since: float | None = None

    def end(self, step: int) -> None:
        """It has computed and sent what it does in `step`."""
        if self._since is not None and step > self.step:
            self.typical.add(time.monotonic() - self._since)
        self.step = max(self.step, step)

    def begin(self) -> None:
        """It computes again."""
        self._since = time.monotonic()

    def interrupt(self) -> None:
        """What is waited for now is not part of a round."""
        self._since = None


def microseconds() -> int:
    """This process's clock."""
    return time.monotonic_ns() // 1000
