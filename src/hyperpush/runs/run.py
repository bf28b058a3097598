"""Run a study or a spec in its folder; `hyperpush.runs.folder` describes the files."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxtyping import PyTree
from rich.console import Console

from hyperpush.base import processes
from hyperpush.base.errors import HyperpushError
from hyperpush.base.status import Status, gather_statuses
from hyperpush.engines.planning import plan
from hyperpush.runs.bars import Bars, Part
from hyperpush.runs.checkpoints import Policy
from hyperpush.runs.events import Kind, append_event, event, read_events, to_json
from hyperpush.runs.experiment import Experiment
from hyperpush.runs.folder import CONFIG, FIGURES, METRICS, MODELS, RunFolder, find_interrupted, reserve
from hyperpush.runs.lifecycle import Lifecycle
from hyperpush.runs.models import save_models
from hyperpush.runs.process import set_up_jax
from hyperpush.runs.tables import table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Finished = tuple[dict[str, Any], "StudyRun"]


class StudyRun:
    """The run, as its experiment sees it: writes records, models and figures, and reports progress."""

    def __init__(self, path: Path, work: Path, console: Console, writes: bool = True):
        self.path = path
        self.console = console if writes else Console(quiet=True)
        self.figures: list[Path] = []
        self.work = work
        self.writes = writes  # if the run has several processes, True in one of them only
        self.bars = Bars(self.console)
        if writes:
            (work / METRICS).touch()
            # A resumed run records its earlier events a second time, so this many events are skipped.
            self._recorded = len(read_events(work / METRICS))

    def record(self, **values: Any) -> None:
        """Append one event of kind `record`, with these values as its fields, to `metrics.jsonl`."""
        self.append("record", values)

    def append(self, kind: Kind, values: Mapping[str, Any]) -> None:
        """Append one event of this kind to `metrics.jsonl`."""
        new = event(kind, values)
        to_json(new)  # raises InvalidInput for numbers that are not finite, also in processes that do not write
        if not self.writes:
            return
        if self._recorded > 0:
            self._recorded -= 1
        else:
            append_event(self.work / METRICS, new)

    def progress(self, label: str, total: float) -> AbstractContextManager[Part]:
        """Show a progress bar while the block runs; blocks may be nested."""
        return self.bars.part(label, total)

    def table(self, title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
        """Show a table on the terminal."""
        self.console.print(table(title, columns, rows))

    def tell(self, status: Status) -> Status:
        """Show the combined status of all results of the run if some result did not converge; return the status."""
        if status.converged is False:
            self.console.print(f"of all results: {status}", soft_wrap=True, highlight=False, markup=False)
        return status

    def figure(self, name: str, figure: "Figure") -> Path:
        """Save a matplotlib figure; return its path in the final folder."""
        inside = Path(FIGURES, f"{name.replace(':', '-')}.png")  # Windows does not allow the colon of module:Class
        if self.writes:
            (self.work / inside).parent.mkdir(exist_ok=True)
            figure.savefig(self.work / inside, format="png")
        self.figures.append(self.path / inside)
        return self.path / inside

    def write(self, name: str, text: str) -> None:
        """Save a text of the experiment, such as a table, as the file `name` in the run folder."""
        path = self.work / name
        if self.writes:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")

    def save_models(self, name: str, stacked: PyTree, names: Sequence[str] | None = None) -> None:
        """Save the arrays of a pytree with clients on axis 0 as the set of models `name` (`hyperpush.runs.models`)."""
        if self.writes or processes.count() > 1:
            save_models(self.work / MODELS / name, stacked, self.writes, names)


def start(
    experiment: Experiment,
    config: Any,
    options: str,
    out: Path | None = None,
    console: Console | None = None,
    checkpoints: Policy | None = None,
) -> Finished:
    """Run an experiment in the folder `out`, and return its result and the run.

    With `out=None`, a new folder under `runs/` is used. `options` is the content of `config.toml`, from which
    `carry_on` reads the same options again. An interrupted run can be continued only with `checkpoints`.
    """
    first = processes.first_process()
    folder = RunFolder(Path(processes.gather_texts(str(reserve(experiment.name, out).path) if first else "")[0]))
    life, console = _life(folder, console, checkpoints)
    with life.hold(), _explained(folder.work), life.attempt():
        life.begin(CONFIG, options)
        return _perform(experiment, config, life, console)


def carry_on(
    folder: Path,
    read: Callable[[Path], tuple[Experiment, Any]],
    console: Console | None = None,
    checkpoints: Policy | None = None,
) -> Finished:
    """Continue an interrupted run; `folder` is its final folder or the hidden folder beside it.

    `read` returns the experiment and its options, given the path of `config.toml`.
    """
    found = find_interrupted(folder)
    life, console = _life(found, console, checkpoints, resumed=True)
    with life.hold():
        experiment, config = read(found.work / CONFIG)
        if processes.first_process():
            found.clear_for_resume()
        with _explained(found.work), life.attempt():
            return _perform(experiment, config, life, console)


def plan_run(experiment: Experiment, config: Any, processes: int = 1) -> dict[str, Any]:
    """Predict the cost of a run with `hyperpush.engines.planning`, without writing files."""

    def run(note: Callable[[Any], None]) -> Any:
        made = StudyRun(Path(), Path(), Console(quiet=True), writes=False)
        made.append = lambda kind, values: note(values)
        return experiment.run(config, made)

    with set_up_jax(getattr(config, "precision", None)):
        return plan(run, processes)


def _life(
    folder: RunFolder, console: Console | None, checkpoints: Policy | None, resumed: bool = False
) -> tuple[Lifecycle, Console]:
    """Return the `Lifecycle` of a run and the console on which the run reports, by default standard error."""
    console = console or Console(stderr=True)
    shown = console if processes.first_process() else Console(quiet=True)

    def warn(text: str) -> None:
        shown.print(f"warning: {text}", soft_wrap=True, highlight=False, markup=False)

    def interrupted(error: BaseException) -> None:
        with suppress(OSError):  # the terminal was closed
            shown.print(f"to continue: hyperpush resume {folder.path}", soft_wrap=True, highlight=False)

    return Lifecycle(folder, checkpoints, resumed, warn, interrupted), shown


def _perform(experiment: Experiment, config: Any, life: Lifecycle, console: Console) -> Finished:
    """Run an experiment in its reserved folder, write the result, and return the result and the run."""
    run = StudyRun(life.folder.path, life.folder.work, console, processes.first_process())
    with set_up_jax(getattr(config, "precision", None)):
        try:
            with life.checkpoints([run.bars]), gather_statuses() as seen:
                result = {"experiment": experiment.name, **experiment.run(config, run)}
            if seen and "status" not in result:
                result["status"] = run.tell(Status.of_all(seen)).as_json()
        finally:
            run.bars.remove()  # remove the bars after success and after errors
    life.keep(to_json(result) + "\n")
    return result, run


@contextmanager
def _explained(work: Path) -> Iterator[None]:
    """Replace an error from the operating system or from another process by an error with one plain sentence."""
    try:
        yield
    except Exception as error:
        _explain(error, work)
        raise


def _explain(error: Exception, work: Path) -> None:
    if isinstance(error, OSError) and error.filename and Path(error.filename).is_relative_to(work):
        raise HyperpushError(f"{error.filename} could not be written: {error.strerror}") from error
    if processes.count() == 1:
        return
    if isinstance(error, RuntimeError) and "non-addressable" in str(error):
        raise HyperpushError(
            "this experiment needs all of a result at once, but results of more than 256 MB stay spread over the "
            "processes: take fewer clients or a smaller model, or one process"
        ) from error
    if type(error).__name__ == "JaxRuntimeError":
        said = str(error).splitlines()[0][:200]
        raise HyperpushError(f"another process of this run has ended or cannot be reached ({said})") from error
