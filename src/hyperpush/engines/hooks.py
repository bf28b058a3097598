"""Hooks: observers of a run, called between compiled chunks. They cannot change its numbers.

All engines call `advance`. Compiled engines also call the methods from `resume_from` on. Checkpoints and the search for
a divergence are such hooks. They may set the point where a run continues, and bound the length of a chunk.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from hyperpush.base import processes
from hyperpush.base.errors import Diverged
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


class Hook:
    """An observer that does nothing: the base of all hooks. Override `advance`, `row` or `finish`.

    Example:
        >>> import jax.numpy as jnp
        >>> import hyperpush as hp
        >>> class Count(hp.hooks.Hook):
        ...     calls = 0
        ...     def row(self, loop, step, values):
        ...         self.calls += 1
        >>> count, task = Count(), hp.tasks.quadratic(3, 0)
        >>> trained = hp.train(task, hp.SGP(steps=4, step_size=0.1), hp.networks.Ring(3), key=0, every=2, hooks=[count])
        >>> count.calls  # the start, and after steps 2 and 4
        3
    """

    def advance(self, loop: str, done: int, total: int) -> None:
        """Observe the progress of a loop that runs on the host.

        Args:
            loop: Name of the loop.
            done: Iterations so far.
            total: Largest number of iterations.
        """

    def row(self, loop: str, step: int, values: Mapping[str, Any]) -> None:
        """Observe a row of the history; rows come in order.

        Args:
            loop: Name of the recorded loop.
            step: Iterations before the row; 0: the start.
            values: Measurements by name, clients on axis 0.
        """

    def finish(self) -> None:
        """Observe the end of the run."""

    def resume_from(self, run: Any) -> Snapshot | None:
        """Return the snapshot from which a run continues, or None to start anew. `run` is a `HostLoop`."""

    def end_chunk(self, done: int, stop: int) -> int:
        """Return the last iteration at which the next chunk of a loop may end."""
        return stop

    def between_chunks(self, cursor: Cursor, snapshot: Callable[[], Snapshot | None]) -> None:
        """Observe the end of a chunk.

        `snapshot()` may be called at any time. It returns None if the run cannot continue from here: a later chunk
        has overwritten the states, or a server in plain Python has changed their structure.
        """
        self.advance(cursor.name, cursor.done, cursor.total)

    def find_divergence(self, cursor: Cursor, replay: Replay | None) -> None:
        """Observe a chunk after which numbers are not finite; `replay` is None if its states were overwritten."""

    def keep_result(self, run: Any, snapshot: Callable[[], Snapshot | None]) -> None:
        """Observe the result of a run. `run` is a `HostLoop`."""


class Divergence(Hook):
    """Hook that ends a diverged run, and names the loop and the first round without finite numbers."""

    def find_divergence(self, cursor: Cursor, replay: Replay | None) -> None:
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


def tell_rows(hooks: Iterable[Hook], loop: str, iterations: Sequence[int], records: Any) -> None:
    """Pass rows recorded after these iterations to the hooks that observe rows; all processes get all clients' rows."""
    listening = [hook for hook in hooks if type(hook).row is not Hook.row]
    if not listening:
        return
    records = processes.gather(records)
    for place, step in enumerate(iterations):
        row = jax.tree.map(lambda leaf, place=place: np.asarray(leaf[place]), records)
        for hook in listening:
            hook.row(loop, step, row)
