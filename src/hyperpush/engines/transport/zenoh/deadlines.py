"""How long to wait for a neighbor's message, asynchronously: as long as its round takes, and the message its way.

Waits are not learned from waits. A peer that waits in vain for a lost message sends its own late. If its neighbors took
it for slow, they would wait longer in vain themselves, and so on up to the longest wait.

So peers send each other heartbeats. A heartbeat says how far the sender is, and how long a round takes it without its
waits. It also carries the time at which it was sent, and returns the newest time that came from the receiver, plus how
long that was held: the difference to the receiver's clock is the round trip, as by the timestamps of TCP (RFC 7323).
None of this depends on how long anybody waits, on losses or on messages that are late.
"""

import time
from collections import deque
from typing import final

# Seconds between two heartbeats: a neighbor's step is known to within a few rounds of small models, and twenty small
# messages a second are no load.
HEARTBEAT = 0.05
# Heartbeats of one peer in a second at most, over all its links: a tenth of what Python sends and reads in that time.
MOST_HEARTBEATS = 1000
# Durations remembered: enough for a second longest one, few enough to follow a machine whose load changes.
REMEMBERED = 16
# A deadline is this times the usual duration: rounds vary, and a deadline that is a little too early loses a message of
# the round, one that is a little too late only time.
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

    # 2 ms: below it, a thread that waits may not even be woken in time.
    def __init__(self, least: float = 0.002, most: float = 2.0):
        self.least, self.most = least, most
        self.forget()

    def forget(self) -> None:
        """Another process is at the other end."""
        self.pace: float | None = None  # what a round takes the neighbor
        self.way = Typical()  # there and back
        self._newest: tuple[int, int] | None = None  # the neighbor's newest time, and when it came

    @property
    def seconds(self) -> float:
        way = self.way.seconds
        if self.pace is None or way is None:
            return self.most
        return min(max(MARGIN * (self.pace + way), self.least), self.most)

    def hear(self, pace: int, sent: int, echo: int) -> None:
        """Take in a heartbeat: the neighbor's pace (0: not known yet), its time, and our own that it returns, or 0."""
        now = microseconds()
        self._newest = sent, now
        if pace:
            self.pace = pace / 1e6
        if echo:
            self.way.add(max(now - echo, 0) / 1e6)

    @property
    def echo(self) -> int:
        """The neighbor's newest time and how long it was held here; 0 if none has come."""
        if self._newest is None:
            return 0
        sent, came = self._newest
        return sent + microseconds() - came


@final
class Rounds:
    """How far this peer is, and how long rounds take it without its waits."""

    def __init__(self) -> None:
        self.step = -1
        self.waits = False  # for somebody who is behind
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

    @property
    def pace(self) -> int:
        """Microseconds of a round; 0 before the first."""
        seconds = self.typical.seconds
        return 0 if seconds is None else max(round(seconds * 1e6), 1)


def microseconds() -> int:
    """This process's clock."""
    return time.monotonic_ns() // 1000
