"""Hooks observe a run. They are called between its compiled chunks and cannot change its numbers.

Without hooks, a run may be compiled as one program instead of several chunks. Its last digits may then differ by
rounding.

To write a hook, subclass `Hook` and override the methods you need. Pass hooks to a verb as `hooks=[…]`.
"""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from hyperpush.base.errors import InvalidInput
from hyperpush.base.files import as_path
from hyperpush.engines.hooks import Hook as Hook
from hyperpush.runs.bars import cost_note, means, rich_bars
from hyperpush.runs.events import append_event, event
from hyperpush.runs.events import read_events as read_events

LOG = logging.getLogger("hyperpush")


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
    """Shows a progress bar on stderr while a verb runs: steps done, the latest mean cost, and the time left.

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
        self.bars = rich_bars(console or Console(stderr=True))
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


class Log(Hook):
    """Logs the means over clients of every recorded row, with the logger `hyperpush` at level INFO."""

    def row(self, loop: str, step: int, values: Mapping[str, Any]) -> None:
        LOG.info("%s %d: %s", loop, step, ", ".join(f"{name} {value:.5g}" for name, value in means(values).items()))


class JSONLines(Hook):
    """Appends the means over clients of every recorded row to a file, as events of kind `row`.

    Args:
        path: The file, with one JSON event per line (`hyperpush.runs.events`). A missing file is created.

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
        self.path = as_path("JSONLines.path", path, "file")
        if not self.path.parent.is_dir():
            raise InvalidInput("JSONLines.path", str(path), "a file in a folder that exists")

    def row(self, loop: str, step: int, values: Mapping[str, Any]) -> None:
        finite = {name: value for name, value in means(values).items() if np.isfinite(value)}
        append_event(self.path, event("row", {"loop": loop, "step": step, **finite}))
