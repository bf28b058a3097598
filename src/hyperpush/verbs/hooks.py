"""Hooks: observers of a run. They are called between compiled chunks and cannot change its numbers.

Subclass `Hook` and override the methods you need; pass objects to a verb as `hooks=[…]`.
"""

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.progress import Progress as RichProgress
from rich.progress import TextColumn

from hyperpush.base import processes
from hyperpush.base.errors import InvalidInput
from hyperpush.engines.result import Recorder
from hyperpush.runs.events import append_event, event
from hyperpush.runs.events import read_events as read_events

LOG = logging.getLogger("hyperpush")


class Hook:
    """An observer that does nothing: the base of all hooks. Override the methods you need.

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


class Listeners:
    """All hooks of a run, as an engine calls them."""

    def __init__(self, hooks: Sequence[Any]):
        if isinstance(hooks, Hook) or not isinstance(hooks, Sequence):
            raise InvalidInput("hooks", type(hooks).__name__, "a list of hooks: hooks=[…]")
        for hook in hooks:
            if not isinstance(hook, Hook):
                allowed = "objects of classes derived from hp.hooks.Hook"
                raise InvalidInput("hooks", hook.__name__ if isinstance(hook, type) else hook, allowed)
        self.hooks = tuple(hooks)
        self.told: Counter[str] = Counter()

    def __call__(self, loop: str, done: int, total: int) -> None:
        for hook in self.hooks:
            hook.advance(loop, done, total)

    def rows(self, loop: str, iterations: list[int], records: Any) -> None:
        """Pass new rows to the hooks; each of several processes gets the rows of all clients."""
        records = processes.gather(records)
        self.told[loop] += len(iterations)
        for place, step in enumerate(iterations):
            row = jax.tree.map(lambda leaf, place=place: np.asarray(leaf[place]), records)
            for hook in self.hooks:
                hook.row(loop, step, row)

    def finish(self, history: Mapping[str, Any], recorders: Mapping[str, Recorder], every: int = 1) -> None:
        """Pass on rows that the engine returns only at the end, then finish all hooks."""
        for loop, records in history.items():
            count, told = len(jax.tree.leaves(records)[0]) if jax.tree.leaves(records) else 0, self.told[loop]
            rest = jax.tree.map(lambda leaf, told=told: leaf[told:], records)
            self.rows(loop, [recorders[loop].iteration(number, every) for number in range(told, count)], rest)
        for hook in self.hooks:
            hook.finish()


def listen(hooks: Sequence[Any]) -> Listeners | None:
    """Return the listeners that an engine calls between chunks; None without hooks."""
    return None if isinstance(hooks, Sequence) and not hooks else Listeners(hooks)


class Progress(Hook):
    """Reports the progress of a run to a function.

    Args:
        tell: Function called as `tell(loop, done, total)` between compiled chunks. An exception ends the run.
    """

    def __init__(self, tell: Callable[[str, int, int], None]):
        if not callable(tell):
            raise InvalidInput("Progress.tell", tell, "a function of (loop, done, total)")
        self.tell = tell

    def advance(self, loop: str, done: int, total: int) -> None:
        self.tell(loop, done, total)


class Bar(Hook):
    """Shows a bar on stderr while a verb runs: steps done, the latest mean cost, and the time left.

    The bar is drawn on terminals only. Elsewhere it prints nothing; use `Log` or `JSONLines` there.

    Args:
        console: The Rich console to draw on; None uses stderr.

    Example:
        >>> import hyperpush as hp
        >>> task, network = hp.tasks.quadratic(3, 0), hp.networks.Ring(3)
        >>> hooks = [hp.hooks.Bar()]
        >>> hp.train(task, hp.SGP(steps=40, step_size=0.1), network, key=0, every=10, hooks=hooks).costs.rounds
        40
    """

    def __init__(self, console: Console | None = None):
        if console is not None and not isinstance(console, Console):
            raise InvalidInput("Bar.console", console, "a rich.console.Console, or None")
        console = console or Console(stderr=True)
        columns = (*RichProgress.get_default_columns(), TextColumn("{task.fields[note]}"))
        self.bars = RichProgress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self.note = ""

    def advance(self, loop: str, done: int, total: int) -> None:
        shown = next((task for task in self.bars.tasks if task.description == loop), None)
        if shown is None:
            number = self.bars.add_task(loop, total=total, note="")
            self.bars.start()
        else:
            number = shown.id
        self.bars.update(number, completed=done, total=total, note=f"{done:,} of {total:,}{self.note}")

    def row(self, loop: str, step: int, values: Mapping[str, Any]) -> None:
        self.note = cost_note(values)

    def finish(self) -> None:
        self.bars.stop()


def cost_note(values: Mapping[str, Any]) -> str:
    """Return rounds, bytes sent and mean cost of a row as text for a bar, each if the row has it."""
    found = means(values)
    parts = [f", {found[name]:,.0f} {name}" for name in ("rounds", "bytes") if name in found]
    return "".join(parts) + (f", cost {found['cost']:.4g}" if "cost" in found else "")


class Log(Hook):
    """Writes every row's means over clients to the logger `hyperpush`, at level INFO."""

    def row(self, loop: str, step: int, values: Mapping[str, Any]) -> None:
        LOG.info("%s %d: %s", loop, step, ", ".join(f"{name} {value:.5g}" for name, value in means(values).items()))


class JSONLines(Hook):
    """Appends every row's means over clients to a file, as events of kind `row` (`hyperpush.runs.events`).

    Args:
        path: The file. A missing file is created.

    Example:
        >>> import tempfile
        >>> import hyperpush as hp
        >>> file, task = tempfile.mkdtemp() + "/rows.jsonl", hp.tasks.quadratic(3, 0)
        >>> hooks = [hp.hooks.JSONLines(file)]
        >>> trained = hp.train(task, hp.SGP(4, 0.1), hp.networks.Ring(3), key=0, every=2, hooks=hooks)
        >>> [(row["kind"], row["loop"], row["step"]) for row in hp.hooks.read_events(file)]
        [('row', 'SGP', 0), ('row', 'SGP', 2), ('row', 'SGP', 4)]
    """

    def __init__(self, path: str | Path):
        if not isinstance(path, str | Path):
            raise InvalidInput("JSONLines.path", path, "the name of a file")
        self.path = Path(path)
        if not self.path.parent.is_dir():
            raise InvalidInput("JSONLines.path", str(path), "a file in a folder that exists")

    def row(self, loop: str, step: int, values: Mapping[str, Any]) -> None:
        finite = {name: value for name, value in means(values).items() if np.isfinite(value)}
        append_event(self.path, event("row", {"loop": loop, "step": step, **finite}))


def means(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the mean over clients of every measurement with one number per client."""
    flat = {**values.get("metrics", {}), **{name: value for name, value in values.items() if name != "metrics"}}
    found = {name: np.asarray(value, np.float64) for name, value in flat.items() if hasattr(value, "shape")}
    return {name: float(value.mean()) for name, value in found.items() if value.ndim <= 1}
