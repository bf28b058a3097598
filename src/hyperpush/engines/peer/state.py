"""How far a peer has come in its program."""

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
    """How far a peer is with the whole of its program."""

    RUNNING = 0
    ENDED = 1  # it is at the end, but for what is on its way to it
    DONE = 2  # others hold, for good, all that it sent
    OVER = 3  # nobody needs anything of it any more


class PeerCursor(NamedTuple):
    """A place in a program, and how often the loops around it have run: what the key of a draw follows from."""

    path: Path = ()
    address: tuple[int, ...] = ()  # positions and iterations on the way
    round: int = 0  # of the innermost loop around it

    def child(self, node: Sequence, position: int) -> "PeerCursor":
        """That place of a sequence."""
        address = self.address if node.keeps_key(position) else (*self.address, position)
        return PeerCursor((*self.path, position), address, self.round)

    def iteration(self, number: int) -> "PeerCursor":
        """The same node, in that iteration."""
        return PeerCursor(self.path, (*self.address, number), number)

    @property
    def body(self) -> "PeerCursor":
        """What a loop or a scope is around of."""
        return PeerCursor((*self.path, 0), self.address, self.round)


@final
@dataclass
class Frame:
    """A node that the peer is inside of, and what it takes to come back to that place."""

    at: int  # the position in a sequence, the iteration of a loop; the step at which a `Scope` was entered
    times: int = 0  # of a loop
    outer: PyTree = None  # the state around a `Scope`
    rows: dict[str, int] = field(default_factory=dict)  # how long each record was when a `Scope` was entered


@final
@dataclass
class PeerCounts:
    """Rounds, traffic and refusals of one peer."""

    rounds: int = 0
    floats: int = 0
    bytes: int = 0  # of messages, for every link that they went over
    late: int = 0
    work: Work = field(default_factory=Work)  # once the program has ended
    rejections: Counter[str] = field(default_factory=Counter)  # messages refused, by `RefusalReason`
    refused: dict[int, Counter[str]] = field(default_factory=dict)  # those with false content, by sender


class RecordedRow(NamedTuple):
    """A record of a loop, and what had happened when it was made."""

    value: Any
    step: int
    floats: int


@final
@dataclass
class PeerState:
    """Where a peer is, apart from its client's state and its running sums."""

    step: int  # of network time
    first: int = 0  # the step at which it began
    closed: frozenset[int] = frozenset()  # who is out of the view
    left: frozenset[int] = frozenset()  # who has left for good
    own: float = 1.0  # the share that it keeps in the exchange it is in
    leaving: bool = False  # for good: its mass is to go to others
    heir: int | None = None  # who was given it
    stage: Stage = Stage.RUNNING
    learned: bool = False  # whether what it takes to learn how often links are up has been counted
    frames: list[Frame] = field(default_factory=list)  # the nodes it is in
    loops: list[tuple[str, int]] = field(default_factory=list)  # names and rounds of the loops it is in
    passes: Counter[Path] = field(default_factory=Counter)  # how often bodies of loops of an agreed length have run
    records: dict[str, list[RecordedRow]] = field(default_factory=dict)
    counts: PeerCounts = field(default_factory=PeerCounts)

    def tick(self, floats: int, sent_bytes: int) -> None:
        """An exchange has taken place, in which so much was sent."""
        self.step += 1
        self.counts.rounds += 1
        self.counts.floats += floats
        self.counts.bytes += sent_bytes

    def epoch(self, address: tuple[int, ...]) -> Path:
        """What tells running sums that begin at an address from all others: where, and in which view."""
        return (*address, self.view) if self.closed else address

    def begin(self, names: Iterable[str]) -> None:
        """Forget what was recorded."""
        self.records = {name: [] for name in names}

    def record(self, name: str, value: PyTree) -> None:
        """Keep a row."""
        self.records[name].append(RecordedRow(value, self.step, self.counts.floats))

    def keep_rows(self, rows: Mapping[str, int]) -> None:
        """Forget all but so many rows of each loop."""
        for name, recorded in self.records.items():
            del recorded[rows.get(name, 0) :]

    @property
    def clocks(self) -> dict[str, RowClock]:
        """When the rows were made."""
        return {name: self._clock(rows) for name, rows in self.records.items() if rows}

    def _clock(self, rows: list[RecordedRow]) -> RowClock:
        return RowClock(np.array([r.step for r in rows]), np.array([r.floats for r in rows]), self.first)

    @property
    def view(self) -> int:
        """The name of the membership on the wire."""
        return zlib.crc32(repr(sorted(self.closed)).encode()) if self.closed else 0

    @property
    def clock(self) -> int:
        """The step as others see it: every new view starts after all steps of the old."""
        return clock(len(self.closed), self.step)


def clock(closed: int, step: int) -> int:
    """A step in a view from which so many have been removed."""
    return (closed << 32) + step
