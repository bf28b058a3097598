"""How far a peer has come in its program."""

import zlib
from collections import Counter
from dataclasses import dataclass, field
from enum import IntEnum
from typing import final

from jaxtyping import PyTree

from hyperpush.counting import Work
from hyperpush.engine import wire
from hyperpush.engine.outcome import Outcome
from hyperpush.program import Path


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

    at: int  # the position in a sequence, the iteration of a loop; the step at which a `Within` was entered
    times: int = 0  # of a loop
    outer: PyTree = None  # the state around a `Within`
    rows: dict[str, int] = field(default_factory=dict)  # how long each record was when a `Within` was entered


@final
@dataclass
class Counts:
    """What a peer has seen of its network."""

    rounds: int = 0
    floats: int = 0
    work: Work = field(default_factory=Work)  # once the program has ended
    late: int = 0
    rejections: wire.Rejections = field(default_factory=wire.Rejections)

    def outcome(
        self, states: PyTree, step: int, history: dict[str, PyTree], late: int, rejected: dict[str, int]
    ) -> Outcome:
        """What a run leaves behind, in which each client did what this one did."""
        return Outcome(
            states=states,
            step=step,
            rounds=self.rounds,
            floats=self.floats,
            hessian_products=self.work["hessian_products"],
            jacobian_products=self.work["jacobian_products"],
            gradients=self.work["gradients"],
            history=history,
            late=late,
            rejected=rejected,
        )


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
    counts: Counts = field(default_factory=Counts)

    @property
    def view(self) -> int:
        """The name of the membership on the wire."""
        return zlib.crc32(repr(sorted(self.closed)).encode()) if self.closed else 0

    @property
    def clock(self) -> int:
        """The step as others see it: every new view starts after all steps of the old."""
        return (len(self.closed) << 32) + self.step
