"""The state of one neighbor of a peer, and texts that describe it."""

import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, NamedTuple, final

from hyperpush.base.errors import Absent, HyperpushError, Refused
from hyperpush.engines.transport.wire import RefusalReason
from hyperpush.engines.transport.zenoh.control import Card
from hyperpush.engines.transport.zenoh.deadlines import Deadline

SESSIONS = 16  # remembered Zenoh sessions per party: more than the usual number of restarts
FORMER = 16  # remembered incarnations per party
# Seconds after which an absent neighbor is reported as lost: a message that it is done may arrive after its session
# has ended.
LOST = 1.0


class Refusal(NamedTuple):
    """The step and reason of a refused message of a neighbor."""

    step: int
    reason: RefusalReason

    def of(self, name: str) -> str:
        """Return a sentence about the refusal of the message of peer `name`."""
        return f"{name}'s message in step {self.step} was refused: {self.reason.words}"


@final
@dataclass
class Neighbor:
    """The state of a neighbor, and of the link to it."""

    name: str
    deadline: Deadline
    alive: bool = False
    token: bool = False  # its presence token exists; with an ended certificate it still counts as absent
    agreed: bool = False  # it has said hello to this process, with a matching card
    done: bool = False
    done_since: float = math.inf
    incarnation: int = 0  # incarnation of the accepted process; 0: none yet
    heard: int = 0  # incarnation in its last hello, which may be a replayed one
    former: list[int] = field(default_factory=list)  # incarnations of formerly accepted processes
    told: float = -math.inf  # last time that a formerly accepted process was informed of its successor
    strange_since: float = math.inf  # time since which it addresses another process under this peer's name
    knows: bool = False  # it has accepted this process
    last_seen: float = -math.inf
    lost: float = field(default_factory=time.monotonic)  # time since which it is absent
    step: int = -1  # step of its newest message, or the one in its heartbeat
    advanced: float = field(default_factory=time.monotonic)  # last time that it advanced or waited for another peer
    sent_data: bool = False  # messages of the program have come from it
    anew: bool = False  # a fresh start of its process was refused
    received_bytes: int = 0
    sent_bytes: int = 0
    early: int = 0  # number of messages that arrived before its hello; it sends them again
    outages: int = 0
    over: bool = False  # its session ended after it was done, which is not an outage
    shown: bool = True  # its last outage was reported to the user
    away: float = 0.0  # total seconds of past outages
    sessions: list[bytes] = field(default_factory=list)  # Zenoh sessions of its hellos
    ends: int = 0  # end of its certificate, in seconds since 1970; 0: unknown
    unfit: str = ""  # why a hello under its name was refused; empty if none was
    answered: int = 0  # incarnation of the refused process that was informed of the reason
    refusals: Counter[RefusalReason] = field(default_factory=Counter)
    last_refusal: Refusal | None = None
    farewell: str = ""  # the reason that it gave for its end; empty if it gave none
    removed: str = ""  # a sentence on why it was removed; empty if it was not
    blamed: bool = False  # it was removed because of invalid messages

    @property
    def expired(self) -> bool:
        """True if the neighbor's certificate has ended."""
        return ended(self.ends)

    def come_to(self, step: int) -> None:
        """Note that the neighbor has reached a step."""
        if step > self.step:
            self.step, self.advanced = step, time.monotonic()

    def come_to_life(self) -> bool:
        """Note that the neighbor is present. Return True if it was reported as lost before."""
        now, returns = time.monotonic(), self.outages > 0 and not self.alive and not self.over
        if returns:
            self.away += now - self.lost
        told = returns and self.shown
        self.alive, self.over, self.shown, self.lost, self.last_seen = True, False, True, math.inf, now
        return told

    def get_lost(self) -> None:
        """Note that the neighbor is absent, and count an outage unless it was done."""
        if self.alive and self.done:
            self.over = True
        elif self.alive:
            self.outages, self.shown = self.outages + 1, False
        self.alive, self.lost = False, time.monotonic()

    def note_end(self) -> None:
        """Note that the neighbor is done. If its session had ended before, undo the count of an outage."""
        if self.done and not (self.alive or self.over) and self.outages:
            self.over, self.shown, self.outages = True, True, self.outages - 1

    def is_lost(self) -> bool:
        """Return True, once per outage, if the neighbor has been absent for `LOST` seconds."""
        if self.shown or self.alive or time.monotonic() - self.lost < LOST:
            return False
        self.shown = True
        return True

    def note_unfit(self, words: str) -> None:
        """Note why a hello under the neighbor's name was refused, unless an accepted process is present."""
        if not (self.agreed and self.alive):
            self.unfit = words

    def adopt(self, incarnation: int, card: Card, step: int, done: bool) -> None:
        """Accept another process as this neighbor, after the process has answered a hello."""
        if self.incarnation:
            self.former = [*self.former, self.incarnation][-FORMER:]
        self.incarnation, self.done, self.step = incarnation, done, -1
        self.strange_since = math.inf
        self.knows, self.unfit, self.farewell = False, "", ""
        self.ends = card.ends
        self.come_to(step)
        self.deadline.forget()

    def meet(self, card: Card) -> None:
        """Remember the Zenoh session from which a hello came."""
        if card.session not in self.sessions:
            self.sessions = [*self.sessions, card.session][-SESSIONS:]

    def refuse(self, reason: RefusalReason, step: int) -> bool:
        """Count a refused message. Return True at the first, tenth, hundredth … message with the same reason."""
        self.refusals[reason] += 1
        if not (reason.of_identity and self.agreed and self.alive):  # else another process has sent it
            self.last_refusal = Refusal(step, reason)
        count = self.refusals[reason]
        return count == 10 ** (len(str(count)) - 1)

    def refused_since(self, step: int) -> Refusal | None:
        """Return the last refusal if it was in this step or later; else None."""
        return self.last_refusal if self.last_refusal is not None and self.last_refusal.step >= step else None

    @property
    def contents_refused(self) -> int:
        """Number of messages refused because of invalid content."""
        return sum(count for reason, count in self.refusals.items() if reason.of_content)

    def status(self) -> dict[str, Any]:
        """Return the facts about the neighbor that the status file shows."""
        now = time.monotonic()
        seen = round(now - self.last_seen, 3) if self.last_seen > -math.inf else None
        away = self.away + (now - self.lost if self.outages and not (self.alive or self.over) else 0.0)
        found = {"alive": self.alive, "step": self.step, "last_seen": seen}
        found |= {"received_bytes": self.received_bytes, "sent_bytes": self.sent_bytes}
        found |= {"outages": self.outages, "away": round(away, 1), "early": self.early}
        found |= {"certificate_ends": self.ends or None, "unfit": self.unfit or None}
        return found | {"refused": {reason.value: count for reason, count in self.refusals.items()}}


def ended(ends: int) -> bool:
    """Return True if a certificate has ended. `ends` is in seconds since 1970; 0: no certificate."""
    return 0 < ends <= time.time()


def shown_time(seconds: int) -> str:
    """Return a time in UTC as hours and minutes, with its date unless it is today."""
    then = datetime.fromtimestamp(seconds, UTC)
    return f"{then:%H:%M} UTC" if then.date() == datetime.now(UTC).date() else f"{then:%Y-%m-%d %H:%M} UTC"


def certificate_ended(name: str, ends: int) -> str:
    """Return a sentence if a certificate has ended; empty if it has not."""
    return f"{name}'s certificate ended at {shown_time(ends)}" if ended(ends) else ""


def explain(other: Neighbor, step: int = 0, strangers: str = "") -> str:
    """Return a text on why messages of a neighbor are missing since `step`.

    `strangers` is a text about refused handshakes, added if the neighbor has never said hello.
    """
    expired = certificate_ended(other.name, other.ends)
    if other.removed or other.farewell or other.unfit:
        return other.removed or other.farewell or other.unfit
    if other.alive:
        refused = other.refused_since(step)
        return _here(other) if refused is None else refused.of(other.name)
    if expired:
        return expired
    if not other.incarnation:
        return f"{other.name} was never heard{strangers}"
    return f"{other.name} is absent for {time.monotonic() - other.lost:.0f} s"


def _here(other: Neighbor) -> str:
    """Return a text about a neighbor that is present but sends nothing."""
    if not other.agreed:
        return f"{other.name} is there, and has not accepted this process; another one may have its place in the run"
    anew = ", and a process has started anew in its place, without its checkpoint" if other.anew else ""
    return f"{other.name} is there, in step {other.step}{anew}"


def waited_in_vain(others: Sequence[Neighbor], step: int) -> type[HyperpushError]:
    """Return the error class for a failed wait.

    It is `Refused` if a message of some neighbor was refused and no other neighbor is absent, else `Absent`.
    """
    blamed = [each.blamed or (each.alive and each.refused_since(step) is not None) for each in others]
    return Refused if any(blamed) and all(b or e.alive for b, e in zip(blamed, others, strict=True)) else Absent
