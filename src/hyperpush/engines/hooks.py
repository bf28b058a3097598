"""Hooks observe a run between its compiled chunks. They cannot change the run's results.

All engines call `advance`, and verbs call `finish`. Compiled engines call `row` during the run; verbs call it at the
end for other engines. Only compiled engines call the methods from `resume_from` on. With these a hook may choose where
a run continues, and may shorten a chunk. Checkpoints and the search for a divergence use them.
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
    """Position of a running program: the loops entered, and the progress of the innermost one."""

    trail: Trail
    name: str  # name of the innermost loop
    done: int
    total: int  # maximum number of iterations
    iterations: int  # iterations since the end of this loop's last chunk
    rounds: int  # communication rounds since then; equal to `iterations` if the loop exchanges no messages


class Snapshot(NamedTuple):
    """All arrays needed to continue a run, by name. The program's profile gives the pytree structure at each path."""

    trail: Trail  # (): the run has ended, and this is its result
    arrays: dict[str, Any]  # "rows": clients on axis 0; "history": on axis 1; "whole" and "clock": no client axis
    clients: int  # number of clients; rows beyond it are padding
    extra: dict[str, int]  # work beyond that in the profile: clients' work with answers of servers in plain Python


class Replay(NamedTuple):
    """Functions that rerun the last chunk from its start, to find the iteration that diverged."""

    finite_after: Callable[[int], bool]  # True if all numbers are finite after the given number of iterations
    walk: Callable[[int], None]  # rerun one iteration on the host; raises Diverged if an inner loop diverges


class Hook:
    """Base class of hooks, which observe a run. Override `advance`, `row` or `finish`; the defaults do nothing.

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
        """Observe a recorded row of a loop. The rows of a loop come in order.

        Args:
            loop: Name of the recorded loop.
            step: Number of iterations before the row, 0 or more.
            values: Measurements by name, clients on axis 0.
        """

    def finish(self) -> None:
        """Observe the end of the run."""

    def resume_from(self, run: Any) -> Snapshot | None:
        """Return the snapshot from which a run continues; None: it starts from the beginning. `run` is a `HostLoop`."""

    def end_chunk(self, done: int, stop: int) -> int:
        """Return the iteration where the next chunk ends, at most `stop`. `done` iterations are complete."""
        return stop

    def between_chunks(self, cursor: Cursor, snapshot: Callable[[], Snapshot | None]) -> None:
        """Observe a point between two chunks.

        `snapshot()` may be called at any time. It returns None if the run cannot continue from here: a later chunk
        has overwritten the states, or a server in plain Python has changed their structure.
        """
        self.advance(cursor.name, cursor.done, cursor.total)

    def find_divergence(self, cursor: Cursor, replay: Replay | None) -> None:
        """Observe a chunk that diverged (NaN or infinity). `replay` is None if its initial states were overwritten."""

    def keep_result(self, run: Any, snapshot: Callable[[], Snapshot | None]) -> None:
        """Observe the result of a run. `run` is a `HostLoop`."""


class Divergence(Hook):
    """Hook that ends a diverged run with an error, which names the loop and the first round that diverged."""

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
    """Pass the rows recorded after these iterations to all hooks that define `row`.

    Each process passes the rows of all clients.
    """
    listening = [hook for hook in hooks if type(hook).row is not Hook.row]
    if not listening:
        return
    records = processes.gather(records)
    for place, step in enumerate(iterations):
        row = jax.tree.map(lambda leaf, place=place: np.asarray(leaf[place]), records)
        for hook in listening:
            hook.row(loop, step, row)
