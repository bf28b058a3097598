"""Watch incoming links for certificates that name no peer of the run, or another peer than the link's user."""

import time
from collections.abc import Mapping
from typing import final

from hyperpush.engines.transport.zenoh.neighbors import Neighbor

# Seconds within which the peer at the other end must say hello under its certificate's name; allows several retries.
SILENCE = 10.0
OTHERS = "others-certificate"
MOST = 256  # largest number of links watched at a time


@final
class Guests:
    """Links opened by others, by the Zenoh session at their other end.

    Args:
        names: Numbers of the peers of the run by name.
        neighbors: The neighbors of this peer, by number.
    """

    def __init__(self, names: Mapping[str, int], neighbors: Mapping[int, Neighbor]):
        self.names, self.neighbors = names, neighbors
        self._open: dict[bytes, tuple[str, float]] = {}  # by session: name in the certificate, time of opening

    def note(self, name: str | None, session: bytes, opened: bool) -> str:
        """Note that a link was opened or closed. Return a reason to count it as refused; empty if there is none."""
        if name is None:
            return ""
        if name not in self.names:
            return "stranger" if opened else ""
        if opened and len(self._open) < MOST:
            self._open.setdefault(session, (name, time.monotonic()))
            return ""
        return self._judge(session) if not opened else ""

    def look(self) -> list[str]:
        """Return the certificate names of links that stayed open for `SILENCE` seconds without a matching hello."""
        now = time.monotonic()
        old = [session for session, (_, since) in self._open.items() if now - since > SILENCE]
        named = [(self._open[session][0], self._judge(session, True)) for session in old]
        return [name for name, found in named if found]

    def _judge(self, session: bytes, late: bool = False) -> str:
        """Stop watching a link. Return `OTHERS` if its session has not said hello under its certificate's name."""
        name, _ = self._open.pop(session, ("", 0.0))
        other = self.neighbors.get(self.names.get(name, -1))
        silent = other is not None and (late or other.incarnation) and session not in other.sessions
        return OTHERS if silent else ""
