"""How far a peer has come in its program."""

import zlib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple, final

import numpy as np
from jaxtyping import PyTree

from hyperpush.engines import wire
from hyperpush.engines.result import RowClock, RunResult
from hyperpush.programs import Path
from hyperpush.programs.counting import Work


class Stage(IntEnum):
    """How far a peer is with the whole of its program."""

    WALKING = 0
    WALKED = 1  # it is at the end, but for what is on its way to it
    DONE = 2  # others hold, for good, all that it sent
    OVER = 3  # nobody needs anything of it any more


@final
@dataclass
class Frame:
    """A node that the walk is inside of, and what it takes to come back to that place."""

    at: int  # the position in a sequence, the iteration of a loop; the step at which a `Scope` was entered
    times: int = 0  # of a loop
    outer: PyTree = None  # the state around a `Scope`
    rows: dict[str, int] = field(default_factory=dict)  # how long each record was when a `Scope` was entered


@final
@dataclass
class Counts:
    """What a peer has seen of its network."""

    rounds: int = 0
    floats: int = 0
    bytes: int = 0  # of messages, for every link that they went over
    work: Work = field(default_factory=Work)  # once the program has ended
    late: int = 0
    rejections: wire.Rejections = field(default_factory=wire.Rejections)

    def outcome(
        self,
        states: PyTree,
        step: int,
        history: dict[str, PyTree],
        clocks: dict[str, RowClock],
        sent: list[int],
        late: int,
        rejected: dict[str, int],
    ) -> RunResult:
        """What a run leaves behind, in which each client did what this one did; `sent`: the bytes of each."""
        return RunResult(
            states=states,
            step=step,
            rounds=self.rounds,
            floats=self.floats,
            work=self.work,
            history=history,
            late=late,
            rejected=rejected,
            clocks=clocks,
            bytes=np.asarray(sent, np.int64),
        )


class Moment(NamedTuple):
    """What had happened when a record was made."""

    step: int
    floats: int
    passes: list[tuple[Path, int]]


@final
@dataclass
class Walked:
    """Where a peer is, apart from its state and its running sums."""

    step: int  # of network time
    first: int = 0  # the step at which it began
    closed: frozenset[int] = frozenset()  # who is out of the view
    left: frozenset[int] = frozenset()  # who has left for good
    own: float = 1.0  # the share that it keeps in the exchange it is in
    leaving: bool = False  # for good: its mass is to go to others
    heir: int | None = None  # who was given it
    stage: Stage = Stage.WALKING
    frames: list[Frame] = field(default_factory=list)  # the nodes it is in
    loops: list[tuple[str, int]] = field(default_factory=list)  # names and rounds of the loops it is in
    passes: Counter[Path] = field(default_factory=Counter)  # how often bodies of loops of an agreed length have run
    history: dict[str, list[PyTree]] = field(default_factory=dict)
    moments: dict[str, list[Moment]] = field(default_factory=dict)  # when what is in the history was recorded
    counts: Counts = field(default_factory=Counts)

    def begin(self, names: Iterable[str]) -> None:
        """Forget what was recorded."""
        self.history, self.moments = {}, {}
        for name in names:
            self.history[name], self.moments[name] = [], []

    def note(self, name: str, record: PyTree) -> None:
        """Keep a record."""
        self.history[name].append(record)
        self.moments[name].append(Moment(self.step, self.counts.floats, list(self.passes.items())))

    def forget(self, rows: Mapping[str, int]) -> None:
        """Keep only so many records of each loop."""
        for kept in (self.history, self.moments):
            for name, recorded in kept.items():
                del recorded[rows.get(name, 0) :]

    @property
    def clocks(self) -> dict[str, RowClock]:
        """When the records were made."""
        return {name: self._clock(moments) for name, moments in self.moments.items() if moments}

    def _clock(self, moments: list[Moment]) -> RowClock:
        step, floats = (np.array([moment[part] for moment in moments], np.int64) for part in (0, 1))
        passes = {
            path: np.array([dict(moment.passes).get(path, 0) for moment in moments], np.int64) for path in self.passes
        }
        return RowClock(step, floats, passes, self.first)

    @property
    def view(self) -> int:
        """The name of the membership on the wire."""
        return zlib.crc32(repr(sorted(self.closed)).encode()) if self.closed else 0

    @property
    def clock(self) -> int:
        """The step as others see it: every new view starts after all steps of the old."""
        return (len(self.closed) << 32) + self.step
