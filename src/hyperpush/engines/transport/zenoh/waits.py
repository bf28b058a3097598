"""Wait for the messages of a step, and raise errors with reasons if they do not arrive."""

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import final

from hyperpush.base.errors import HyperpushError
from hyperpush.engines.transport.protocol import LAST
from hyperpush.engines.transport.zenoh.control import Topic
from hyperpush.engines.transport.zenoh.deadlines import Rounds
from hyperpush.engines.transport.zenoh.links import Link
from hyperpush.engines.transport.zenoh.membership import Membership
from hyperpush.engines.transport.zenoh.neighbors import Neighbor, certificate_ended, explain, waited_in_vain

# Seconds by which the announcement that a peer is done may arrive before its last message. Control messages overtake
# data, and a payload of 256 MiB takes that long at 200 Mbit/s.
OVERTAKES = 10.0


@final
class Waits:
    """The ways in which a peer waits for messages. Callers hold the transport's lock, which a wait releases.

    Args:
        members: The membership.
        links: Messages that have arrived, by neighbor.
        rounds: Progress of this peer.
        changed: The transport's lock.
        patience: Seconds after which a wait fails with an error.
        check: Function that raises the error by which this peer has ended, if it has.
        ask: Function that sends a control message, given a topic, a neighbor and a step.
    """

    def __init__(
        self,
        members: Membership,
        links: Mapping[int, Link],
        rounds: Rounds,
        changed: threading.Condition,
        patience: float,
        check: Callable[[], None],
        ask: Callable[[Topic, int, int], None],
    ):
        self.members, self.links, self.rounds, self.changed = members, links, rounds, changed
        self.neighbors, self.patience, self._check, self._ask = members.neighbors, patience, check, ask
        self.handshakes: Callable[[], Mapping[str, int]] = dict  # refused handshakes by reason; empty if not counted
        self._collecting = -1, 0.0  # the step waited for, and the time when the wait began

    def in_step(self, step: int, expected: Collection[int]) -> None:
        """Wait, in synchronous mode, until all expected messages are here; raise an error after `patience` seconds."""
        if self._collecting[0] != step:  # a refused message does not restart the wait
            self._collecting = step, time.monotonic()
        while True:
            self._check()
            missing = [sender for sender in expected if not self.links[sender].has(step)]
            if not missing:
                return
            for sender in missing:
                if self.links[sender].asks_again(step):
                    self._ask(Topic.HELLO, sender, step)
            left = self._collecting[1] + self.patience - time.monotonic()
            self._complain(step, [self.neighbors[sender] for sender in missing], left <= 0)
            self.changed.wait(min(left, 1.0))

    def at_own_pace(self, step: int, expected: Collection[int]) -> None:
        """Wait, in asynchronous mode, for each expected message until its deadline.

        Also wait for neighbors more than LEAD rounds behind, until they catch up or are removed. If such a neighbor is
        absent, it is removed after `close_after` seconds.
        """
        start = time.monotonic()
        if step < LAST:
            self.rounds.end(step)
        try:
            while True:
                self._check()
                self.members.remove_gone()
                behind = self.members.behind(step)
                self.members.remove_stalled(behind, self.patience)
                self.rounds.waits = bool(behind)
                unheard = [e for e in expected if not (self.links[e].has(step) or self.members.is_hopeless(e))]
                waits = [self.neighbors[each].deadline.seconds for each in unheard]
                left = start + max(waits, default=0.0) - time.monotonic()
                if left <= 0 and not behind:
                    return
                self.changed.wait(min(left, 1.0) if left > 0 else 0.2)  # heartbeats also wake it
        finally:
            self.rounds.waits = False

    def _complain(self, step: int, waiting: Sequence[Neighbor], late: bool) -> None:
        before = time.monotonic() - min(OVERTAKES, self.patience)
        left = [other.name for other in waiting if other.done and other.done_since < before]
        if left:
            raise HyperpushError(f"peer {self.members.name}, step {step}: done before sending: {', '.join(left)}")
        if late:
            raise self.in_vain(f"no message within {self.patience:g} s from", waiting, step)

    def in_vain(
        self, what: str, missing: Sequence[Neighbor], step: int | None = None, then: str = ""
    ) -> HyperpushError:
        """Return the error for a failed wait: `what`, the neighbors in `missing`, `then`, and the known reasons."""
        seen = ", ".join(f"{count} {reason}" for reason, count in self.handshakes().items())
        strangers = f" (handshakes refused here: {seen})" if seen else ""
        own = certificate_ended(self.members.name, self.members.card.ends)
        reasons = [*([own] if own else []), *(explain(other, step or 0, strangers) for other in missing)]
        me = f"peer {self.members.name}"
        where = me if step is None else f"{me}, step {step}"
        names = ", ".join(other.name if other.alive else f"{other.name} (absent)" for other in missing)
        if self.members.returned and not any(other.incarnation for other in self.neighbors.values()):
            reasons = [
                "no peer has answered since this one returned: all others have ended or are absent; "
                "its checkpoint stays, and continues once they are started again"
            ]
        said = f"{where}: {' '.join(filter(None, (what, names)))}{then}"
        return waited_in_vain(missing, step or 0)(": ".join(filter(None, (said, "; ".join(reasons)))))
