"""How long to wait for a neighbour: as long as its link has shown to be worth it.

A link's wait is the time from when a message is wanted until it comes, also if that is after we went on. Its deadline
is the mean wait plus four mean deviations, both smoothed, as TCP sets its retransmission timer (Jacobson 1988; RFC
6298). Messages that never come leave no trace in it: a lossy link is not a slow one.
"""

from collections import OrderedDict
from typing import final

GAIN, DEVIATION_GAIN, DEVIATIONS = 1 / 8, 1 / 4, 4.0
REMEMBERED = 256  # steps of which late messages still say how late they are


@final
class Deadline:
    """Of one link, in seconds, between `least` and `most`; before anything has come, `most`."""

    def __init__(self, least: float = 0.002, most: float = 2.0):
        self.least, self.most = least, most
        self.mean: float | None = None
        self.deviation = 0.0
        self._wanted: OrderedDict[int, float] = OrderedDict()

    def want(self, step: int, now: float) -> None:
        """The message of `step` is waited for from `now` on."""
        self._wanted.setdefault(step, now)
        while len(self._wanted) > REMEMBERED:
            self._wanted.popitem(last=False)

    def came(self, step: int, now: float) -> None:
        """The message of `step` is here; one that was there before it was wanted cost no wait."""
        since = self._wanted.pop(step, None)
        if since is not None:
            self.waited(max(now - since, 0.0))

    def waited(self, seconds: float) -> None:
        """Learn from one wait."""
        if self.mean is None:
            self.mean, self.deviation = seconds, seconds / 2
            return
        self.deviation += DEVIATION_GAIN * (abs(seconds - self.mean) - self.deviation)
        self.mean += GAIN * (seconds - self.mean)

    @property
    def seconds(self) -> float:
        if self.mean is None:
            return self.most
        return min(max(self.mean + DEVIATIONS * self.deviation, self.least), self.most)
