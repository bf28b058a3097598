"""Deadlines for a neighbor's message in asynchronous mode, from the neighbor's usual round time and the round trip.

Deadlines must not depend on how long peers have waited. A peer that waits in vain for a lost message sends its own
message late. If its neighbors concluded that it is slow, they would also wait longer in vain, and so on up to the
longest wait.

So peers send each other heartbeats. A heartbeat holds the sender's step, the duration of its rounds without waits, and
the time of sending. It also echoes the newest time received from the other end, plus the time since its arrival. The
receiver subtracts this echo from its clock and gets the round trip time, as with the timestamps of TCP (RFC 7323).
None of these values depends on waits, losses or late messages.
"""

import time
from collections import deque
from typing import final

# Seconds between two heartbeats: a neighbor's step is known to within a few rounds of small models, and twenty small
# messages a second are a negligible load.
HEARTBEAT = 0.05
# Largest number of heartbeats per peer and second, over all links: a tenth of the number that Python can handle.
MOST_HEARTBEATS = 1000
# Number of remembered durations: enough that the second longest is typical, few enough to follow a changing load.
REMEMBERED = 16
# Ratio of a deadline to the usual duration. Rounds vary: a deadline slightly too early loses a message of the round, a
# deadline slightly too late loses only time.
MARGIN = 1.5


@final
class Typical:
    """A duration that is seldom exceeded: the second longest of the last ones, because one may include compilation."""

    def __init__(self) -> None:
        self._last: deque[float] = deque(maxlen=REMEMBERED)

    def add(self, seconds: float) -> None:
        """Add a measured duration in seconds."""
        self._last.append(seconds)

    @property
    def seconds(self) -> float | None:
        return sorted(self._last)[-2:][0] if self._last else None


@final
class Deadline:
    """Deadline of one link in seconds, from `least` to `most`.

    It is `most` until both the neighbor's round time and the round trip time are known.
    """

    # `least` is 2 ms, because a shorter wait may end before the operating system wakes the thread.
    def __init__(self, least: float = 0.002, most: float = 2.0):
        self.least, self.most = least, most
        self.forget()

    def forget(self) -> None:
        """Reset all measurements, because another process is now at the other end."""
        self.pace: float | None = None  # seconds of a neighbor's round; None: unknown
        self.way = Typical()  # round trip time
        self._newest: tuple[int, int] | None = None  # times of the newest heartbeat: sent, arrived

    @property
    def seconds(self) -> float:
        way = self.way.seconds
        if self.pace is None or way is None:
            return self.most
        return min(max(MARGIN * (self.pace + way), self.least), self.most)

    def hear(self, pace: int, sent: int, echo: int) -> None:
        """Receive a heartbeat.

        Args:
            pace: The neighbor's microseconds per round; 0: unknown.
            sent: The time of sending, by the neighbor's clock.
            echo: The newest time that this peer sent, plus the time that it spent at the neighbor; 0: none.
        """
        now = microseconds()
        self._newest = sent, now
        if pace:
            self.pace = pace / 1e6
        if echo:
            self.way.add(max(now - echo, 0) / 1e6)

    @property
    def echo(self) -> int:
        """The time in the neighbor's newest heartbeat plus the time since its arrival, in microseconds; 0 if none."""
        if self._newest is None:
            return 0
        sent, came = self._newest
        return sent + microseconds() - came


@final
class Rounds:
    """The step of this peer, and the duration of its rounds without waits."""

    def __init__(self) -> None:
        self.step = -1
        self.waits = False  # True while this peer waits for a peer that is behind
        self.typical = Typical()
        self._since: float | None = None

    def end(self, step: int) -> None:
        """Note that this peer has computed and sent its messages of `step`."""
        if self._since is not None and step > self.step:
            self.typical.add(time.monotonic() - self._since)
        self.step = max(self.step, step)

    def begin(self) -> None:
        """Note that this peer starts to compute the next round."""
        self._since = time.monotonic()

    def interrupt(self) -> None:
        """Exclude the round that contains the current wait from the measured durations."""
        self._since = None

    @property
    def pace(self) -> int:
        """Typical duration of a round in microseconds; 0 before the first round ends."""
        seconds = self.typical.seconds
        return 0 if seconds is None else max(round(seconds * 1e6), 1)


def microseconds() -> int:
    """Return the monotonic clock of this process, in microseconds."""
    return time.monotonic_ns() // 1000
