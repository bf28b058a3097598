"""Links from the outside whose certificates name no peer, or another one than those who speak on them."""

import time
from collections.abc import Mapping
from typing import final

from hyperpush.engines.transport.zenoh.neighbors import Neighbor

# Seconds that a link may exist before its owner has said hello under the name of its certificate: several retries.
SILENCE = 10.0
OTHERS = "others-certificate"
MOST = 256  # links that are watched at a time


@final
class Guests:
    """Links that were opened from the outside, by the session at their other end.

    Args:
        names: Numbers of the peers of the run by name.
        neighbors: Those that this peer talks to.
    """

    def __init__(self, names: Mapping[str, int], neighbors: Mapping[int, Neighbor]):
        self.names, self.neighbors = names, neighbors
        self._open: dict[bytes, tuple[str, float]] = {}  # session: the name of its certificate, since when

    def note(self, name: str | None, session: bytes, opened: bool) -> str:
        """Take in that a link was opened or closed; why it counts as refused, or nothing."""
        if name is None:
            return ""
        if name not in self.names:
            return "stranger" if opened else ""
        if opened and len(self._open) < MOST:
            self._open.setdefault(session, (name, time.monotonic()))
            return ""
        return self._judge(session) if not opened else ""

    def look(self) -> list[str]:
        """Names on certificates whose links are open for long, without a hello under these names."""
        now = time.monotonic()
        old = [session for session, (_, since) in self._open.items() if now - since > SILENCE]
        named = [(self._open[session][0], self._judge(session, True)) for session in old]
        return [name for name, found in named if found]

    def _judge(self, session: bytes, late: bool = False) -> str:
        """Forget a link; tell if its session has not said hello under the name of its certificate."""
        name, _ = self._open.pop(session, ("", 0.0))
        other = self.neighbors.get(self.names.get(name, -1))
        silent = other is not None and (late or other.incarnation) and session not in other.sessions
        return OTHERS if silent else ""
