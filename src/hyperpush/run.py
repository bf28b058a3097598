"""One run of an experiment, and the folder it leaves: `hyperpush.saved` says what is in it.

The folder appears when the run has succeeded; a run that fails leaves nothing.
"""

import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import Any

import platformdirs
from pydantic import BaseModel
from rich.console import Console
from rich.progress import Progress, TaskID

from hyperpush import saved
from hyperpush.config import to_toml
from hyperpush.errors import InvalidInput
from hyperpush.experiments.registry import Experiment
from hyperpush.report.tables import table


@dataclass(frozen=True)
class Bar:
    """A progress bar to move on."""

    bars: Progress
    task: TaskID

    def advance(self, steps: float = 1) -> None:
        """Add to what is done."""
        self.bars.advance(self.task, steps)

    def update(self, completed: float) -> None:
        """Say how much is done."""
        self.bars.update(self.task, completed=completed)


class Run:
    """What an experiment is handed: a place for its records, models and figures, and a way to report progress."""

    def __init__(self, path: Path, work: Path, console: Console):
        self.path = path
        self.console = console
        self.figures: list[Path] = []
        self._work = work
        self._bars = Progress(console=console, transient=True, disable=not console.is_terminal)
        (work / saved.METRICS).touch()

    def record(self, **values: Any) -> None:
        """Append one line to the metrics, readable by others at once."""
        line = saved.to_json(values)
        with (self._work / saved.METRICS).open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    @contextmanager
    def progress(self, label: str, total: float) -> Iterator[Bar]:
        """A progress bar while the block runs; blocks may be nested."""
        task = self._bars.add_task(label, total=total)
        self._bars.start()
        try:
            yield Bar(self._bars, task)
        finally:
            self._bars.refresh()
            self._bars.remove_task(task)
            if not self._bars.tasks:
                self._bars.stop()

    def table(self, title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
        """Show a table on the terminal."""
        self.console.print(table(title, columns, rows))

    def figure(self, name: str, figure: Any) -> Path:
        """Save a matplotlib figure; returns the path it has when the run is done."""
        inside = Path(saved.FIGURES, f"{name}.png")
        (self._work / inside).parent.mkdir(exist_ok=True)
        figure.savefig(self._work / inside, format="png")
        self.figures.append(self.path / inside)
        return self.path / inside

    def write(self, name: str, text: str) -> None:
        """Save a text file of the experiment's own, such as a table, under a name in the run folder."""
        path = self._work / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    def save_models(self, name: str, stacked: Any) -> None:
        """Save the arrays of a pytree whose leaves have the client axis first, one file for each client."""
        saved.save_models(self._work / saved.MODELS / name, stacked)


def execute(
    experiment: Experiment, config: BaseModel, out: Path | None = None, console: Console | None = None
) -> tuple[dict[str, Any], Run]:
    """Run an experiment into the folder `out`, by default a new one under `runs/`; returns its result and the run."""
    path, work = _reserve(experiment.name, out)
    try:
        (work / saved.CONFIG).write_text(to_toml(experiment.name, config), encoding="utf-8")
        run = Run(path, work, console or Console(stderr=True))
        with _jax(getattr(config, "precision", None)):
            result = {"experiment": experiment.name, **experiment.run(config, run)}
        (work / saved.RESULT).write_text(saved.to_json(result) + "\n", encoding="utf-8")
        work.rename(path)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
    return result, run


def _reserve(name: str, out: Path | None) -> tuple[Path, Path]:
    """The run folder, and the folder beside it that is renamed to it in the end."""
    if out is None:
        stem = Path("runs", f"{name}-{datetime.now():%Y%m%d-%H%M%S}")
        candidates: Iterable[Path] = (stem.with_name(f"{stem.name}-{k}") if k else stem for k in count())
    else:
        candidates = [out if out.name else out.resolve()]
    for path in candidates:
        work = path.with_name(f".{path.name}.partial")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists() and (out is None or any(path.iterdir())):
                continue
            with suppress(FileExistsError):
                work.mkdir()
                return path, work
        except OSError as error:
            raise InvalidInput("--out", str(path), f"a folder that can be written ({error.strerror})") from None
    raise InvalidInput("--out", str(out), "a new or empty folder that no other run is writing to")


@contextmanager
def _jax(precision: str | None) -> Iterator[None]:
    """JAX as a run wants it: compiled code kept between runs, and float64 only if asked for."""
    import jax

    cache = os.environ.get("HYPERPUSH_CACHE") or platformdirs.user_cache_path("hyperpush") / "jax"
    jax.config.update("jax_compilation_cache_dir", str(cache))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    before = jax.config.read("jax_enable_x64")
    if precision is not None:
        jax.config.update("jax_enable_x64", precision == "float64")
    try:
        yield
    finally:
        jax.config.update("jax_enable_x64", before)
