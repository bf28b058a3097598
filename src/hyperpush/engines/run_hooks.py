"""What sees a run of a compiled engine between its chunks: progress, checkpoints, divergence.

Hooks never change numbers. They may say where a run continues, and where a chunk ends at the latest.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from jaxtyping import PyTree

from hyperpush.base.errors import Diverged
from hyperpush.engines.result import Listener, Progress
from hyperpush.programs import Path

SMALLER = "A smaller step size may help."

Trail = tuple[tuple[Path, int], ...]  # the loops that the host is in, outermost first, and the iterations done


class Cursor(NamedTuple):
    """Where a run is."""

    trail: Trail
    name: str  # of the innermost loop
    done: int
    total: int  # iterations at most
    iterations: int  # since the last boundary of this loop
    rounds: int  # exchanges since the last boundary; iterations where nothing is exchanged


class Snapshot(NamedTuple):
    """All that is needed to continue: arrays by name, as the profile knows the structure at every path."""

    trail: Trail  # (): the run has ended, and this is its result
    arrays: dict[str, Any]  # "rows": clients on axis 0; "history": on axis 1; "whole" and "clock" have no such axis
    clients: int  # rows beyond them are padding
    extra: dict[str, int]  # work that the profile could not foresee


class Replay(NamedTuple):
    """The last chunk again, from its start."""

    finite_after: Callable[[int], bool]  # whether all numbers are finite after so many iterations of the loop
    walk: Callable[[int], None]  # step through one iteration by the host: a loop inside that diverges raises


class RunHook:
    """Sees a run, a `HostLoop` (which imports this module), and does nothing: the base of what does."""

    def start(self, run: Any) -> Snapshot | None:
        """Called before a run; a snapshot says where it continues."""

    def room(self, done: int, stop: int) -> int:
        """Where the next chunk of a loop ends at the latest."""
        return stop

    def rows(self, loop: str, iterations: list[int], records: PyTree) -> None:
        """Rows that were just recorded, after so many iterations."""

    def boundary(self, cursor: Cursor, snapshot: Callable[[], Snapshot | None]) -> None:
        """Called after every chunk.

        `snapshot()` may be called at any time. It gives None where the run cannot continue from here: a later chunk
        has overwritten the states, or a server in plain Python has changed their structure.
        """

    def diverged(self, cursor: Cursor, replay: Replay | None) -> None:
        """Called when not all numbers are finite after a chunk, which can be replayed unless it was overwritten."""

    def finish(self, run: Any, snapshot: Callable[[], Snapshot | None]) -> None:
        """Called after a run with its result."""


class ProgressHook(RunHook):
    """Tells a function how far a loop is, and shows rows to a `Listener`."""

    def __init__(self, progress: Progress):
        self.progress = progress

    def rows(self, loop: str, iterations: list[int], records: PyTree) -> None:
        if isinstance(self.progress, Listener):
            self.progress.rows(loop, iterations, records)

    def boundary(self, cursor: Cursor, snapshot: Callable[[], Snapshot | None]) -> None:
        self.progress(cursor.name, cursor.done, cursor.total)


class Divergence(RunHook):
    """Ends a run whose numbers are no longer finite, and names the loop and the first such round."""

    def diverged(self, cursor: Cursor, replay: Replay | None) -> None:
        good, bad = cursor.done - cursor.iterations, cursor.done
        if replay is None:
            raise Diverged(cursor.name, bad, f"Or some rounds before, after {good}. {SMALLER}")
        while bad - good > 1:
            middle = (good + bad) // 2
            good, bad = (middle, bad) if replay.finite_after(middle) else (good, middle)
        try:
            replay.walk(good)
        except Diverged as inside:
            if inside.where[:1].isupper():  # a method; all other loops are parts of one
                raise
        raise Diverged(cursor.name, bad, SMALLER)
