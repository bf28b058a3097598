"""Hooks called between the chunks of a compiled run: progress, checkpoints, divergence.

Hooks never change numbers. They may set the point where a run continues, and bound the length of a chunk.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from jaxtyping import PyTree

from hyperpush.base.errors import Diverged
from hyperpush.engines.result import Listener, Progress
from hyperpush.programs import Path

SMALLER = "A smaller step size may help."

Trail = tuple[tuple[Path, int], ...]  # the loops entered on the host, outermost first, each with its iterations done


class Cursor(NamedTuple):
    """Position of a run."""

    trail: Trail
    name: str  # name of the innermost loop
    done: int
    total: int  # maximum number of iterations
    iterations: int  # since the last boundary of this loop
    rounds: int  # exchanges since the last boundary; iterations if the loop exchanges nothing


class Snapshot(NamedTuple):
    """All arrays needed to continue a run, by name; the profile knows the structure at every path."""

    trail: Trail  # (): the run has ended, and this is its result
    arrays: dict[str, Any]  # "rows": clients on axis 0; "history": on axis 1; "whole" and "clock": no client axis
    clients: int  # number of clients; rows beyond it are padding
    extra: dict[str, int]  # work that the profile could not foresee


class Replay(NamedTuple):
    """The last chunk again, from its start."""

    finite_after: Callable[[int], bool]  # True if all numbers are finite after the given number of iterations
    walk: Callable[[int], None]  # repeat one iteration on the host; an inner loop that diverges raises


class RunHook:
    """Base class of hooks, which does nothing. `run` is a `HostLoop`, whose module imports this one."""

    def start(self, run: Any) -> Snapshot | None:
        """Called before a run. Return the snapshot from which it continues, or None to start anew."""

    def room(self, done: int, stop: int) -> int:
        """Return the last iteration at which the next chunk of a loop may end."""
        return stop

    def rows(self, loop: str, iterations: list[int], records: PyTree) -> None:
        """Called with rows that were just recorded, after these `iterations`."""

    def boundary(self, cursor: Cursor, snapshot: Callable[[], Snapshot | None]) -> None:
        """Called after every chunk.

        `snapshot()` may be called at any time. It returns None if the run cannot continue from here: a later chunk
        has overwritten the states, or a server in plain Python has changed their structure.
        """

    def diverged(self, cursor: Cursor, replay: Replay | None) -> None:
        """Called if numbers are not finite after a chunk; `replay` is None if its states were overwritten."""

    def finish(self, run: Any, snapshot: Callable[[], Snapshot | None]) -> None:
        """Called after a run with its result."""


class ProgressHook(RunHook):
    """Hook that reports progress to a function, and rows to a `Listener`."""

    def __init__(self, progress: Progress):
        self.progress = progress

    def rows(self, loop: str, iterations: list[int], records: PyTree) -> None:
        if isinstance(self.progress, Listener):
            self.progress.rows(loop, iterations, records)

    def boundary(self, cursor: Cursor, snapshot: Callable[[], Snapshot | None]) -> None:
        self.progress(cursor.name, cursor.done, cursor.total)


class Divergence(RunHook):
    """Hook that ends a diverged run, and names the loop and the first round without finite numbers."""

    def diverged(self, cursor: Cursor, replay: Replay | None) -> None:
        good, bad = cursor.done - cursor.iterations, cursor.done
        if replay is None:
            raise Diverged(cursor.name, bad, f"It may have diverged earlier, after round {good}. {SMALLER}")
        while bad - good > 1:
            middle = (good + bad) // 2
            good, bad = (middle, bad) if replay.finite_after(middle) else (good, middle)
        try:
            replay.walk(good)
        except Diverged as inside:
            if inside.where[:1].isupper():  # a method; all other loops are parts of one
                raise
        raise Diverged(cursor.name, bad, SMALLER)
