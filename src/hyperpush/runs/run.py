"""One run of an experiment, and the folder it leaves: `hyperpush.runs.saved` says what is in it.

The folder appears when the run has succeeded; a run that fails leaves nothing. An interrupted run leaves its
checkpoints in a hidden folder beside it, from which `resume` continues.
"""

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel
from rich.console import Console
from rich.progress import Progress, TaskID, TextColumn

from hyperpush.errors import Diverged, HyperpushError, InvalidInput
from hyperpush.runs import saved
from hyperpush.runs.checkpoints import Policy
from hyperpush.runs.config import load_config, to_toml
from hyperpush.runs.experiment import Experiment
from hyperpush.runs.files import write_atomically
from hyperpush.runs.locks import alone
from hyperpush.runs.report.tables import table

if TYPE_CHECKING:
    from hyperpush.engines.run_hooks import ProgressHook
    from hyperpush.runs.checkpoints.journal import Journal

CHECKPOINTS, LOCK = "checkpoints", "lock"
SECONDS_PER_LINE = 30.0  # of progress, where there is no terminal to draw bars on


@dataclass(frozen=True)
class Bar:
    """A progress bar to move on."""

    bars: Progress
    task: TaskID
    tell: Callable[[], None]

    def advance(self, steps: float = 1) -> None:
        """Add to what is done."""
        self.bars.advance(self.task, steps)
        self.tell()

    def update(self, completed: float) -> None:
        """Say how much is done."""
        self.bars.update(self.task, completed=completed)
        self.tell()


class StudyRun:
    """What an experiment is handed: a place for its records, models and figures, and a way to report progress."""

    def __init__(self, path: Path, work: Path, console: Console, writes: bool = True):
        self.path = path
        self.console = console if writes else Console(quiet=True)
        self.figures: list[Path] = []
        self._work = work
        self._writes = writes  # of several processes one does
        self._bars = Progress(
            *Progress.get_default_columns(),
            TextColumn("{task.fields[note]}"),
            console=self.console,
            transient=True,
            disable=not self.console.is_terminal,
        )
        self._phase: TaskID | None = None
        self._told = time.monotonic()
        if writes:
            (work / saved.METRICS).touch()
            # A run that continues records again what it had recorded: those lines are there already.
            self._recorded = len((work / saved.METRICS).read_bytes().splitlines())

    def record(self, **values: Any) -> None:
        """Append one line to the metrics, readable by others at once."""
        line = saved.to_json(values)
        if not self._writes:
            return
        if self._recorded > 0:
            self._recorded -= 1
            return
        with (self._work / saved.METRICS).open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def phase(self, name: str, done: int, total: int) -> None:
        """Show how far the loop is that an engine is in, the time left of it, memory and compilation."""
        note = f"{done:,} of {total:,} rounds, {resident_megabytes():,.0f} MB, compiled {_compiled['seconds']:.0f} s"
        shown = next((task for task in self._bars.tasks if task.id == self._phase), None)
        if shown is None:
            self._phase = self._bars.add_task(name, total=total, note=note)
            self._bars.start()
        elif shown.description != name or done < shown.completed:  # another loop, or the same one again
            self._bars.reset(shown.id, total=total, description=name)
        assert self._phase is not None
        self._bars.update(self._phase, completed=done, note=note)
        self._tell()

    @contextmanager
    def progress(self, label: str, total: float) -> Iterator[Bar]:
        """A progress bar while the block runs; blocks may be nested."""
        task = self._bars.add_task(label, total=total, note="")
        self._bars.start()
        try:
            yield Bar(self._bars, task, self._tell)
        finally:
            self._bars.refresh()
            self._bars.remove_task(task)
            if set(self._bars.task_ids) <= {self._phase}:
                self.quiet()

    def quiet(self) -> None:
        """Take all bars away."""
        for left in self._bars.task_ids:
            self._bars.remove_task(left)
        self._bars.stop()

    def _tell(self) -> None:
        """Off a terminal, all bars as a line now and then."""
        if not self._bars.disable or time.monotonic() - self._told < SECONDS_PER_LINE:
            return
        self._told = time.monotonic()
        parts = []
        for task in self._bars.tasks:
            of = f"{task.completed:g} of {task.total:g}"
            parts.append(f"{task.description} {task.fields['note'] or of}")
            if task.time_remaining is not None:
                parts[-1] += f", about {timedelta(seconds=round(task.time_remaining))} left"
        self.console.print("; ".join(parts), soft_wrap=True, highlight=False, markup=False)

    def table(self, title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
        """Show a table on the terminal."""
        self.console.print(table(title, columns, rows))

    def figure(self, name: str, figure: Any) -> Path:
        """Save a matplotlib figure; returns the path it has when the run is done."""
        inside = Path(saved.FIGURES, f"{name}.png")
        if self._writes:
            (self._work / inside).parent.mkdir(exist_ok=True)
            figure.savefig(self._work / inside, format="png")
        self.figures.append(self.path / inside)
        return self.path / inside

    def write(self, name: str, text: str) -> None:
        """Save a text file of the experiment's own, such as a table, under a name in the run folder."""
        path = self._work / name
        if self._writes:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")

    def save_models(self, name: str, stacked: Any, names: Sequence[str] | None = None) -> None:
        """Save the arrays of a pytree whose leaves have the client axis first, one file for each client, by name."""
        several = _several()
        if self._writes or several is not None:
            saved.save_models(self._work / saved.MODELS / name, stacked, self._writes, names)


def execute(
    experiment: Experiment,
    config: BaseModel,
    out: Path | None = None,
    console: Console | None = None,
    checkpoints: Policy | None = None,
) -> tuple[dict[str, Any], StudyRun]:
    """Run an experiment into the folder `out`, by default a new one under `runs/`; returns its result and the run.

    With `checkpoints`, `resume` can continue an interrupted run.
    """
    path = Path(_told(lambda: str(_reserve(experiment.name, out)[0])))
    work = _partial(path)
    with _locked(path, work):
        try:
            if _first():
                write_atomically(work / saved.CONFIG, to_toml(experiment.name, config))
        except BaseException:
            shutil.rmtree(work, ignore_errors=True)
            raise
        return _perform(experiment, config, path, work, console or Console(stderr=True), checkpoints)


def resume(
    folder: Path, known: Mapping[str, Experiment], console: Console | None = None, checkpoints: Policy | None = None
) -> tuple[dict[str, Any], StudyRun]:
    """Continue an interrupted run; `folder` is where its result would be, or the hidden one beside it."""
    path, work = find_interrupted(folder)
    with _locked(path, work):
        experiment, config = load_config(str(work / saved.CONFIG), [], known)
        if _first():
            _tidy(work)
        return _perform(experiment, config, path, work, console or Console(stderr=True), checkpoints, again=True)


def planned(experiment: Experiment, config: BaseModel, processes: int = 1) -> dict[str, Any]:
    """What a run would take, by `hyperpush.engines.planning`; no files are written."""
    from hyperpush.engines.planning import plan

    def run(note: Callable[[Any], None]) -> Any:
        made = StudyRun(Path(), Path(), Console(quiet=True), writes=False)
        made.record = lambda **values: note(values)
        return experiment.run(config, made)

    with _jax(getattr(config, "precision", None)):
        return plan(run, processes)


def _perform(
    experiment: Experiment,
    config: BaseModel,
    path: Path,
    work: Path,
    console: Console,
    checkpoints: Policy | None,
    *,
    again: bool = False,
) -> tuple[dict[str, Any], StudyRun]:
    journal = None
    try:
        run = StudyRun(path, work, console, _first())
        with _jax(getattr(config, "precision", None)):
            if checkpoints is not None:
                journal = _journal(run, work, checkpoints)
            with nullcontext() if journal is None else journal.active(_phases(run)), _bars_of(run):
                result = {"experiment": experiment.name, **experiment.run(config, run)}
        if (several := _several()) is not None:
            several.barrier("all models are written")
        if _first():
            write_atomically(work / saved.RESULT, saved.to_json(result) + "\n")
            work.rename(path)  # what `resume` needs is there until the result is
            shutil.rmtree(path / CHECKPOINTS, ignore_errors=True)
            (path / LOCK).unlink(missing_ok=True)
    except BaseException as error:
        same = isinstance(error, InvalidInput | Diverged)  # a new run would end the same way again
        if not same:
            _keep(journal, error)
        if _first() and not again and (same or not _kept(work)):
            shutil.rmtree(work, ignore_errors=True)
        elif _first() and work.is_dir() and not isinstance(error, Diverged):
            console.print(f"to continue: hyperpush resume {path}", soft_wrap=True, highlight=False)
        _explain(error, work)
        raise
    return result, run


@contextmanager
def _bars_of(run: StudyRun) -> Iterator[None]:
    """Bars go when the experiment ends, however it does."""
    try:
        yield
    finally:
        run.quiet()


def _explain(error: BaseException, work: Path) -> None:
    """Say in a sentence what the system or another process did to a run."""
    if isinstance(error, OSError) and error.filename and Path(error.filename).is_relative_to(work):
        raise HyperpushError(f"{error.filename} could not be written: {error.strerror}") from error
    if _several() is not None and isinstance(error, RuntimeError) and "non-addressable" in str(error):
        raise HyperpushError(
            "this experiment needs all of a result at once, but results of more than 256 MB stay spread over the "
            "processes: take fewer clients or a smaller model, or one process"
        ) from error
    if _several() is not None and type(error).__name__ == "JaxRuntimeError":
        said = str(error).splitlines()[0][:200]
        raise HyperpushError(f"another process of this run has ended or cannot be reached ({said})") from error


def _several() -> Any:
    """`hyperpush.processes` in a run of several; None alone, without loading JAX to find out."""
    module = sys.modules.get("hyperpush.processes")
    return module if module is not None and module.count() > 1 else None


def _first() -> bool:
    """Whether this is the process that writes."""
    several = _several()
    return several is None or several.first_process()


def _told(find: Callable[[], str]) -> str:
    """What the first process finds, at all."""
    several = _several()
    return find() if several is None else several.gather_texts(find() if several.first_process() else "")[0]


def _journal(run: StudyRun, work: Path, policy: Policy) -> "Journal":
    from hyperpush.runs.checkpoints.journal import Journal
    from hyperpush.runs.checkpoints.store import Store

    def warn(text: str) -> None:
        run.console.print(f"warning: {text}", soft_wrap=True, highlight=False, markup=False)

    return Journal(Store(work / CHECKPOINTS, warn), policy)


def _phases(run: StudyRun) -> "ProgressHook":
    """Shows the loop that an engine is in."""
    from hyperpush.engines.run_hooks import ProgressHook  # not before it is needed: it loads JAX

    return ProgressHook(run.phase)


def _kept(work: Path) -> bool:
    """Whether there is a checkpoint to continue from."""
    return any((work / CHECKPOINTS).glob("[0-9]*"))


def _keep(journal: "Journal | None", error: BaseException) -> None:
    """Save what an interrupted run has reached."""
    if journal is None:
        return
    # Several processes write together, at the end of a chunk; if one has failed, there is no together.
    if not isinstance(error, HyperpushError) and _several() is None:
        try:
            journal.save()
        except HyperpushError as also:
            print("error:", also, file=sys.stderr)


def find_interrupted(folder: Path) -> tuple[Path, Path]:
    """The run folder to be, and the hidden one, of an interrupted run."""
    folder = folder if folder.name else folder.resolve()
    hidden = folder.name.startswith(".") and folder.name.endswith(".partial")
    path = folder.with_name(folder.name[1 : -len(".partial")]) if hidden else folder
    work = _partial(path)
    if not (work / saved.CONFIG).is_file():
        finished = (path / saved.RESULT).is_file()
        given = f"{folder}, a finished run" if finished else str(folder)
        raise InvalidInput("run", given, "the folder of an interrupted run that has checkpoints")
    return path, work


def _tidy(work: Path) -> None:
    """Remove from an interrupted run all but what it continues from: complete records, and checkpoints."""
    for each in work.iterdir():
        if each.name in (saved.MODELS, saved.FIGURES):
            shutil.rmtree(each)
    lines = []
    with suppress(OSError):
        for line in (work / saved.METRICS).read_bytes().splitlines(keepends=True):
            try:
                json.loads(line)
            except ValueError:
                break
            if not line.endswith(b"\n"):
                break
            lines.append(line)
    write_atomically(work / saved.METRICS, b"".join(lines))


def _locked(path: Path, work: Path) -> AbstractContextManager[None]:
    """Refuse a folder that another live process writes to."""
    return alone(work / LOCK, "run", path, "a run that no other process is writing") if _first() else nullcontext()


def _partial(path: Path) -> Path:
    """The hidden folder that is renamed to the run folder in the end."""
    return path.with_name(f".{path.name}.partial")


def resident_megabytes() -> float:
    """Memory of this process that is resident; 0 where the system does not tell (not Linux)."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
    except (OSError, ValueError):
        return 0.0


def _reserve(name: str, out: Path | None) -> tuple[Path, Path]:
    """The run folder, and the folder beside it that is renamed to it in the end."""
    if out is None:
        stem = Path("runs", f"{name}-{datetime.now():%Y%m%d-%H%M%S}")
        candidates: Iterable[Path] = (stem.with_name(f"{stem.name}-{k}") if k else stem for k in count())
    else:
        candidates = [out if out.name else out.resolve()]
    for path in candidates:
        work = _partial(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists() and (out is None or any(path.iterdir())):
                continue
            with suppress(FileExistsError):
                work.mkdir()
                return path, work
        except OSError as error:
            raise InvalidInput("--out", str(path), f"a folder that can be written ({error.strerror})") from None
    allowed = "a new or empty folder that no other run is writing to"
    if out is not None and (_partial(out) / saved.CONFIG).is_file():
        allowed += f"; a run into this one was interrupted or is under way: hyperpush resume {out} continues it"
    raise InvalidInput("--out", str(out), allowed)


_compiled = {"seconds": 0.0, "listening": 0.0}  # of this process


def _count_compilation(event: str, duration_secs: float, **_: Any) -> None:
    if event.endswith("backend_compile_duration"):
        _compiled["seconds"] += duration_secs


@contextmanager
def _jax(precision: str | None) -> Iterator[None]:
    """JAX as a run wants it: compiled code kept between runs, and float64 only if asked for."""
    import jax

    from hyperpush.settings import keep_compiled_code

    keep_compiled_code()
    if not _compiled["listening"]:
        _compiled["listening"] = 1.0
        jax.monitoring.register_event_duration_secs_listener(_count_compilation)
    before = jax.config.read("jax_enable_x64")
    if precision is not None:
        jax.config.update("jax_enable_x64", precision == "float64")
    try:
        yield
    finally:
        jax.config.update("jax_enable_x64", before)
