"""Show the progress of a run with hooks: as bars on a terminal, elsewhere as a line of text every 30 seconds."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress, TaskID, TextColumn

from hyperpush.engines.hooks import Hook
from hyperpush.runs.process import compile_time, resident_megabytes

SECONDS_PER_LINE = 30.0  # time between lines of progress, which are printed if the output is not a terminal


def rich_bars(console: Console) -> Progress:
    """Return a Rich display of progress bars, each with the time left and a note; it is drawn on terminals only."""
    columns = (*Progress.get_default_columns(), TextColumn("{task.fields[note]}"))
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


class Part(Hook):
    """Progress bar of one part of an experiment.

    As the hook of a verb, the bar shows the steps and the latest mean cost of the verb.
    """

    def __init__(self, bars: Progress, task: TaskID, shown: Callable[[], None], total: float):
        self._bars, self._task, self._shown, self._total, self._cost = bars, task, shown, total, ""

    def step(self, steps: float = 1) -> None:
        """Increase the number of steps done by `steps`."""
        self._bars.advance(self._task, steps)
        self._shown()

    def update(self, completed: float, note: str = "") -> None:
        """Set the number of steps done, and the note beside the bar."""
        self._bars.update(self._task, completed=completed, note=note)
        self._shown()

    def advance(self, loop: str, done: int, total: int) -> None:
        self.update(self._total * done / max(total, 1), f"{done:,} of {total:,} steps{self._cost}")

    def row(self, loop: str, step: int, values: Mapping[str, Any]) -> None:
        self._cost = cost_note(values)


class Bars(Hook):
    """All progress bars of a run.

    One bar shows the loop that the engine runs now; each part of the experiment has a further bar.
    """

    def __init__(self, console: Console):
        self.console, self.rich = console, rich_bars(console)
        self._loop: TaskID | None = None
        self._last_line = time.monotonic()

    def advance(self, loop: str, done: int, total: int) -> None:
        """Show the progress of the loop that the engine runs now, with time left, memory use and compilation time."""
        compiled = compile_time().seconds
        note = f"{done:,} of {total:,} rounds, {resident_megabytes():,.0f} MB, compiled {compiled:.0f} s"
        shown = next((task for task in self.rich.tasks if task.id == self._loop), None)
        if shown is None:
            self._loop = self.rich.add_task(loop, total=total, note=note)
            self.rich.start()
        elif shown.description != loop or done < shown.completed:  # another loop, or the same loop a second time
            self.rich.reset(shown.id, total=total, description=loop)
        assert self._loop is not None
        self.rich.update(self._loop, completed=done, note=note)
        self._print_line()

    @contextmanager
    def part(self, label: str, total: float) -> Iterator[Part]:
        """Show a progress bar while the block runs; blocks may be nested."""
        task = self.rich.add_task(label, total=total, note="")
        self.rich.start()
        try:
            yield Part(self.rich, task, self._print_line, total)
        finally:
            self.rich.refresh()
            self.rich.remove_task(task)
            if set(self.rich.task_ids) <= {self._loop}:
                self.remove()

    def remove(self) -> None:
        """Remove all progress bars from the terminal."""
        for left in self.rich.task_ids:
            self.rich.remove_task(left)
        with suppress(OSError):  # the terminal was closed
            self.rich.stop()

    def _print_line(self) -> None:
        """Print all bars as one line of text if the output is not a terminal and `SECONDS_PER_LINE` have passed."""
        if not self.rich.disable or time.monotonic() - self._last_line < SECONDS_PER_LINE:
            return
        self._last_line = time.monotonic()
        parts = []
        for task in self.rich.tasks:
            of = f"{task.completed:g} of {task.total:g}"
            parts.append(f"{task.description} {task.fields['note'] or of}")
            if task.time_remaining is not None:
                parts[-1] += f", about {timedelta(seconds=round(task.time_remaining))} left"
        self.console.print("; ".join(parts), soft_wrap=True, highlight=False, markup=False)


def cost_note(values: Mapping[str, Any]) -> str:
    """Return the text for a progress bar: rounds, bytes sent and mean cost, as far as a recorded row has them."""
    found = means(values)
    parts = [f", {found[name]:,.0f} {name}" for name in ("rounds", "bytes") if name in found]
    return "".join(parts) + (f", cost {found['cost']:.4g}" if "cost" in found else "")


def means(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the mean over clients of each measurement that has one number per client; leave out all others."""
    flat = {**values.get("metrics", {}), **{name: value for name, value in values.items() if name != "metrics"}}
    found = {name: np.asarray(value, np.float64) for name, value in flat.items() if hasattr(value, "shape")}
    return {name: float(value.mean()) for name, value in found.items() if value.ndim <= 1}
