"""Progress of a peer in its program: its place there, its counts, and its recorded rows."""

import zlib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple, final

import numpy as np
from jaxtyping import PyTree

from hyperpush.engines.result import RowClock
from hyperpush.programs import Path, Sequence
from hyperpush.programs.counting import Work


class Stage(IntEnum):
    """Stages of a peer, from running its program to the end of the run."""

    RUNNING = 0
    ENDED = 1  # it has finished the program; messages to it may be in transit
    DONE = 2  # others have made all its messages durable
    OVER = 3  # no other peer needs this one anymore


class PeerCursor(NamedTuple):
    """A place in a program, and the iterations of the loops around it. Together they determine the random keys."""

    path: Path = ()
    address: tuple[int, ...] = ()  # positions in sequences and iterations of loops, from the outermost node on
    round: int = 0  # iteration of the innermost loop around this place

    def child(self, node: Sequence, position: int) -> "PeerCursor":
        """Return the cursor of the node at `position` of a sequence."""
        address = self.address if node.keeps_key(position) else (*self.address, position)
        return PeerCursor((*self.path, position), address, self.round)

    def iteration(self, number: int) -> "PeerCursor":
        """Return the cursor of the same loop in iteration `number`."""
        return PeerCursor(self.path, (*self.address, number), number)

    @property
    def body(self) -> "PeerCursor":
        """Cursor of the body of the loop or scope at this cursor."""
        return PeerCursor((*self.path, 0), self.address, self.round)


@final
@dataclass
class Frame:
    """A node that the peer has entered, with the data needed to return to that place."""

    at: int  # position in a sequence, iteration of a loop, or step at which a `Scope` was entered
    times: int = 0  # number of iterations of a loop
    outer: PyTree = None  # the state around a `Scope`
    rows: dict[str, int] = field(default_factory=dict)  # length of each record when a `Scope` was entered


@final
@dataclass
class PeerCounts:
    """Rounds, traffic and refusals of one peer."""

    rounds: int = 0
    floats: int = 0
    bytes: int = 0  # bytes of messages, counted once per link
    late: int = 0
    work: Work = field(default_factory=Work)  # gradients and products computed; set at the end of the program
    rejections: Counter[str] = field(default_factory=Counter)  # messages refused, by `RefusalReason`
    refused: dict[int, Counter[str]] = field(default_factory=dict)  # with invalid content, by sender and reason
    stages: int = 0  # number of averages that have ended
    isolated: int = 0  # how many of them contain little of other parties' values
    why_isolated: str = ""  # the reason for the first of these; empty if there are none

    def end_stage(self, why: str) -> None:
        """Count the end of an average. `why` says why it contains little of other parties' values, or is empty."""
        self.stages += 1
        self.isolated += bool(why)
        self.why_isolated = self.why_isolated or why

    @property
    def isolation(self) -> str:
        """Sentence about averages that contain little of other parties' values; empty if there are none."""
        return f"{self.why_isolated}, in {self.isolated} of {self.stages} averages" if self.isolated else ""


class RecordedRow(NamedTuple):
    """A recorded row of a loop, with the network time and the numbers sent so far."""

    value: Any
    step: int
    floats: int


@final
@dataclass
class PeerState:
    """Progress of a peer. It does not include the client's state and the running sums."""

    step: int  # network time
    first: int = 0  # network time at the start
    closed: frozenset[int] = frozenset()  # members removed from the view
    left: frozenset[int] = frozenset()  # members that have left for good
    own: float = 1.0  # share of its message that the peer keeps in the current exchange
    leaving: bool = False  # True while the peer leaves for good, and transfers its mass
    heir: int | None = None  # peer that got this peer's mass; None: not yet transferred
    stage: Stage = Stage.RUNNING
    learned: bool = False  # True once the messages for learning link frequencies have been counted
    frames: list[Frame] = field(default_factory=list)  # nodes that the peer has entered, outermost first
    loops: list[tuple[str, int]] = field(default_factory=list)  # names and iterations of loops that it has entered
    passes: Counter[Path] = field(default_factory=Counter)  # iterations of loops of agreed length, by path of the body
    records: dict[str, list[RecordedRow]] = field(default_factory=dict)
    counts: PeerCounts = field(default_factory=PeerCounts)

    def tick(self, floats: int, sent_bytes: int) -> None:
        """Count an exchange in which this peer sent `floats` numbers and `sent_bytes` bytes."""
        self.step += 1
        self.counts.rounds += 1
        self.counts.floats += floats
        self.counts.bytes += sent_bytes

    def epoch(self, address: tuple[int, ...]) -> Path:
        """Return the identifier of running sums that start at an address, with the current members."""
        return (*address, self.view) if self.closed else address

    def begin(self, names: Iterable[str]) -> None:
        """Start empty records for the loops with these names."""
        self.records = {name: [] for name in names}

    def record(self, name: str, value: PyTree) -> None:
        """Add a row to the record of a loop."""
        self.records[name].append(RecordedRow(value, self.step, self.counts.floats))

    def keep_rows(self, rows: Mapping[str, int]) -> None:
        """Keep only the first `rows[name]` rows of each loop."""
        for name, recorded in self.records.items():
            del recorded[rows.get(name, 0) :]

    @property
    def clocks(self) -> dict[str, RowClock]:
        """Network time and traffic at the recorded rows, by loop."""
        return {name: self._clock(rows) for name, rows in self.records.items() if rows}

    def _clock(self, rows: list[RecordedRow]) -> RowClock:
        return RowClock(np.array([r.step for r in rows]), np.array([r.floats for r in rows]), self.first)

    @property
    def view(self) -> int:
        """Identifier, in messages, of the set of removed members; 0 if no member is removed."""
        return zlib.crc32(repr(sorted(self.closed)).encode()) if self.closed else 0

    @property
    def clock(self) -> int:
        """Step number in messages. After a change of the membership, it exceeds all earlier step numbers."""
        return clock(len(self.closed), self.step)


def clock(closed: int, step: int) -> int:
    """Return the step number in messages at `step`, after `closed` members have been removed."""
    return (closed << 32) + step
