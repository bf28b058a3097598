"""Progress of a peer in its program."""

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
    """Progress of a peer with its whole program."""

    RUNNING = 0
    ENDED = 1  # it has finished the program; messages to it may be under way
    DONE = 2  # others have made all its messages durable
    OVER = 3  # no other peer needs it any more


class PeerCursor(NamedTuple):
    """A place in a program, and the iterations of the loops around it, which determine the keys of draws."""

    path: Path = ()
    address: tuple[int, ...] = ()  # positions and iterations on the way
    round: int = 0  # iteration of the innermost loop around it

    def child(self, node: Sequence, position: int) -> "PeerCursor":
        """Return the cursor of the node at `position` of a sequence."""
        address = self.address if node.keeps_key(position) else (*self.address, position)
        return PeerCursor((*self.path, position), address, self.round)

    def iteration(self, number: int) -> "PeerCursor":
        """Return the cursor of the same node in iteration `number`."""
        return PeerCursor(self.path, (*self.address, number), number)

    @property
    def body(self) -> "PeerCursor":
        """Cursor of the body of a loop or scope."""
        return PeerCursor((*self.path, 0), self.address, self.round)


@final
@dataclass
class Frame:
    """A node that the peer is inside of, with the data needed to return to that place."""

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
    work: Work = field(default_factory=Work)  # set at the end of the program
    rejections: Counter[str] = field(default_factory=Counter)  # messages refused, by `RefusalReason`
    refused: dict[int, Counter[str]] = field(default_factory=dict)  # messages with false content, by sender and reason
    stages: int = 0  # ends of averages, and how many of them say little about the others, with the first reason
    isolated: int = 0
    why_isolated: str = ""

    def end_stage(self, why: str) -> None:
        """Count the end of an average, and the reason why it says little about the others; empty if it does not."""
        self.stages += 1
        self.isolated += bool(why)
        self.why_isolated = self.why_isolated or why

    @property
    def isolation(self) -> str:
        """What the result says about averages that say little about the others; empty if there are none."""
        return f"{self.why_isolated}, in {self.isolated} of {self.stages} averages" if self.isolated else ""


class RecordedRow(NamedTuple):
    """A row of a loop's record, with the network time and traffic at that point."""

    value: Any
    step: int
    floats: int


@final
@dataclass
class PeerState:
    """Progress of a peer, without its client's state and its running sums."""

    step: int  # network time
    first: int = 0  # network time at the start
    closed: frozenset[int] = frozenset()  # members removed from the view
    left: frozenset[int] = frozenset()  # members that have left for good
    own: float = 1.0  # share that it keeps in the current exchange
    leaving: bool = False  # True while it leaves for good, and transfers its mass
    heir: int | None = None  # peer that got its mass; None: not yet transferred
    stage: Stage = Stage.RUNNING
    learned: bool = False  # True once the messages for learning link frequencies have been counted
    frames: list[Frame] = field(default_factory=list)  # nodes that it is inside of, outermost first
    loops: list[tuple[str, int]] = field(default_factory=list)  # names and iterations of the loops that it is inside of
    passes: Counter[Path] = field(default_factory=Counter)  # number of runs of each body of a loop of agreed length
    records: dict[str, list[RecordedRow]] = field(default_factory=dict)
    counts: PeerCounts = field(default_factory=PeerCounts)

    def tick(self, floats: int, sent_bytes: int) -> None:
        """Count an exchange in which this peer sent `floats` numbers and `sent_bytes` bytes."""
        self.step += 1
        self.counts.rounds += 1
        self.counts.floats += floats
        self.counts.bytes += sent_bytes

    def epoch(self, address: tuple[int, ...]) -> Path:
        """Return the identifier of running sums that start at an address in the current view."""
        return (*address, self.view) if self.closed else address

    def begin(self, names: Iterable[str]) -> None:
        """Start empty records of these loops."""
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
        """Identifier of the membership on the wire; 0 if no member is removed."""
        return zlib.crc32(repr(sorted(self.closed)).encode()) if self.closed else 0

    @property
    def clock(self) -> int:
        """Step number for messages: each new view starts after all steps of the old."""
        return clock(len(self.closed), self.step)


def clock(closed: int, step: int) -> int:
    """Return the clock of a step in a view from which `closed` members have been removed."""
    return (closed << 32) + step
