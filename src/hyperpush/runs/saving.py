"""Runs from Python that are kept in a folder: the same call resumes or returns, another one is refused.

A folder holds `call.json` (what was called), `result.json` (status, costs), `history.safetensors`, and one file per
owner under `models/params` and `models/hypers`. While a run is under way its files are in a hidden folder beside it.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
from jaxtyping import PyTree
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from hyperpush import registry
from hyperpush.errors import Diverged, InvalidInput, unknown
from hyperpush.privacy.budget import Budget
from hyperpush.results import Costs, Estimate, History, Result, Solution, Training
from hyperpush.runs import saved
from hyperpush.runs.checkpoints import Policy
from hyperpush.runs.checkpoints.journal import Journal, values_digest
from hyperpush.runs.checkpoints.store import Store
from hyperpush.runs.files import write_atomically
from hyperpush.runs.fingerprint import fingerprint
from hyperpush.runs.locks import alone
from hyperpush.status import Status
from hyperpush.task import Task
from hyperpush.version import __version__

FORMAT = 1  # of the folder
CALL, HISTORY, CHECKPOINTS = "call.json", "history.safetensors", "checkpoints"
CLASSES: dict[str, type[Result]] = {"Training": Training, "Estimate": Estimate, "Solution": Solution}
R = TypeVar("R", bound=Result)
ARRAYS = ("params", "hypers", "value")


def describe(verb: str, task: Task, method: Any, network: Any, key: Any, **options: Any) -> dict[str, Any]:
    """What tells a call from another one, as JSON."""
    parts = {"inner": task.inner, "outer": task.outer, "penalty": task.penalty, "outer_penalty": task.outer_penalty}
    rows = task.clients if task.owner is None else 1
    arrays = (task.params, task.hypers, task.data.sets)
    stacked = arrays if task.owner is None else jax.tree.map(lambda leaf: leaf[None], arrays)
    return {
        "format": FORMAT,
        "verb": verb,
        "method": _written(method),
        "network": _written(network),
        "key": np.asarray(jax.random.key_data(key)).tolist(),
        "names": list(task.names) if task.owner is None else [task.names[task.owner]],
        "task": {name: fingerprint(part) for name, part in parts.items() if part is not None},
        **({} if task.privacy is None else {"private": str(task.privacy)}),
        **{name: values_digest(part, rows) for name, part in zip(("params", "hypers"), stacked, strict=False)},
        "data": {name: values_digest(part, rows) for name, part in stacked[2].items()},
        **{name: value for name, value in options.items() if value is not None},
    }


def _written(given: Any) -> Any:
    try:
        return registry.table(given)
    except InvalidInput:  # it holds functions or objects of other libraries
        return fingerprint(given)


def keep(folder: str | Path, call: Mapping[str, Any], task: Task, compute: Callable[[], R]) -> R:
    """The result of a call that is kept in a folder: read back, resumed or computed."""
    if not isinstance(folder, str | Path):
        raise InvalidInput("save", folder, "the name of a folder")
    path = Path(folder)
    if path.is_file():
        raise InvalidInput("save", str(path), "a folder, not a file")
    written = json.loads(json.dumps(call))
    if (path / CALL).is_file():
        _refuse_other(path, path / CALL, written)
        return load(path, task).result
    if path.exists() and any(path.iterdir()):
        raise InvalidInput("save", str(path), "a new or empty folder, or one that the same call has made")
    work = path.with_name(f".{path.name}.partial")
    try:
        work.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidInput("save", str(path), f"a folder that can be written ({error.strerror})") from None
    with alone(work / "lock", "save", path, "a folder that no other process is writing"):
        if (work / CALL).is_file():
            _refuse_other(path, work / CALL, written)
        write_atomically(work / CALL, json.dumps(call, indent=1))
        return _computed(path, work, compute)


def _computed(path: Path, work: Path, compute: Callable[[], R]) -> R:
    journal = Journal(Store(work / CHECKPOINTS, lambda text: None), Policy())
    try:
        with journal.active():
            result = compute()
    except BaseException as error:
        if isinstance(error, InvalidInput | Diverged):  # the same call would end the same way
            shutil.rmtree(work, ignore_errors=True)
        else:
            journal.save()
        raise
    write(work, result)
    shutil.rmtree(work / CHECKPOINTS, ignore_errors=True)
    if path.exists():
        path.rmdir()
    work.rename(path)
    (path / "lock").unlink(missing_ok=True)
    return result


def _refuse_other(path: Path, file: Path, call: Mapping[str, Any]) -> None:
    """Refuse a folder of another call, naming the first thing that differs."""
    before = json.loads(file.read_text(encoding="utf-8"))
    if before.get("format") != FORMAT:
        raise InvalidInput("save", f"{path}, of format {before.get('format')}", f"a folder of format {FORMAT}")
    name, was, now = _difference("", before, dict(call))
    if name:
        given = f"{path}, where {name} was {_short(was)}"
        raise InvalidInput("save", given, f"another folder: here {name} is {_short(now)}")


def _difference(name: str, was: Any, now: Any) -> tuple[str, Any, Any]:
    """The first thing that differs, by its dotted name; an empty name if nothing does."""
    if isinstance(was, dict) and isinstance(now, dict):
        for key in {**was, **now}:
            found = _difference(f"{name}.{key}" if name else key, was.get(key), now.get(key))
            if found[0]:
                return found
        return "", None, None
    return ("", None, None) if was == now else (name, was, now)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 100 else text[:97] + "…"


def write(folder: Path, result: Result) -> None:
    """A result's files."""
    about = {"format": FORMAT, "class": type(result).__name__, "names": list(result.names), "version": __version__}
    about |= {"costs": asdict(result.costs), "status": asdict(result.status), "alone": result.task.owner is not None}
    if result.privacy is not None:
        budget = result.privacy
        about["privacy"] = {"releases": dict(budget.releases), "parts": budget.to_table(), "assumes": budget.assumes}
    if isinstance(result, Solution):
        about["best_step"] = result.best_step
    for name in ARRAYS:
        tree = getattr(result, name, None)
        if tree is not None:
            stacked = tree if result.task.owner is None else jax.tree.map(lambda leaf: leaf[None], tree)
            saved.save_models(folder / saved.MODELS / name, stacked, True, result.names)
    history = getattr(result, "history", None)
    if isinstance(history, History):
        save_file(_history_arrays(history), folder / HISTORY)
    write_atomically(folder / saved.RESULT, json.dumps(about, indent=1))


def _history_arrays(history: History) -> dict[str, np.ndarray]:
    found: dict[str, Any] = {f"metrics/{name}": values for name, values in history.metrics.items()}
    for each in fields(history):
        value = getattr(history, each.name)
        if each.name not in ("metrics", "hypers") and value is not None:
            found[each.name] = value
    return {name: np.ascontiguousarray(value) for name, value in found.items()}


@dataclass(frozen=True)
class Run:
    """A run that was kept: its call, its status and costs, and its result.

    Attributes:
        path: Its folder.
        about: What `result.json` says.
        task: The task that it was loaded with; None: arrays come by name.
    """

    path: Path
    about: Mapping[str, Any]
    task: Task | None

    @property
    def call(self) -> dict[str, Any]:
        """What was called."""
        return json.loads((self.path / CALL).read_text(encoding="utf-8")) if (self.path / CALL).is_file() else {}

    @property
    def status(self) -> Status:
        return Status(**self.about["status"])

    @property
    def costs(self) -> Costs:
        return Costs(**self.about["costs"])

    def arrays(self, name: str) -> dict[str, np.ndarray]:
        """`"params"`, `"hypers"` or `"value"`: all owners' arrays by name, owners on axis 0."""
        folder = self.path / saved.MODELS / name
        if not folder.is_dir():
            raise unknown("arrays", name, [each.name for each in (self.path / saved.MODELS).iterdir()])
        owners = [_load_arrays(folder / saved.owner_file(owner)) for owner in self.about["names"]]
        return {key: np.stack([own[key] for own in owners]) for key in owners[0]}

    @cached_property
    def result(self) -> Any:
        """The result in the task's pytrees, of the class that the verb returned; without a task, arrays by name."""
        present = [name for name in ARRAYS if (self.path / saved.MODELS / name).is_dir()]
        if self.task is None:
            return {name: self.arrays(name) for name in present}
        task, alone = self.task, bool(self.about["alone"])
        trees = {name: self._tree(name, task, alone) for name in present}
        params = task.problem.whole(trees["params"]) if "params" in trees else None
        at = task.at(params=trees.get("params"), hypers=trees.get("hypers"))
        if "privacy" in self.about:
            at = at.replace(spent=Budget.from_table(self.about["privacy"]["parts"]))
        kind, shared = CLASSES[self.about["class"]], (at, self.status, self.costs)
        if kind is Estimate:
            return Estimate(*shared, trees["value"])
        if kind is Training:
            return Training(*shared, params, self.history)
        return Solution(*shared, params, trees["hypers"], self.history or _no_history(), self.about["best_step"])

    @property
    def history(self) -> History | None:
        """Cost and metrics by step."""
        if not (self.path / HISTORY).is_file():
            return None
        found = _load_arrays(self.path / HISTORY)
        metrics = {
            name.removeprefix("metrics/"): found.pop(name) for name in list(found) if name.startswith("metrics/")
        }
        return History(**found, metrics=metrics)

    def _tree(self, name: str, task: Task, alone: bool) -> PyTree:
        like = {"params": task.params, "hypers": task.hypers, "value": task.hypers}[name]
        found = self.arrays(name)
        leaves, structure = jax.tree_util.tree_flatten_with_path(like)
        named = [(jax.tree_util.keystr(path, simple=True, separator="/"), leaf) for path, leaf in leaves]
        if set(found) != {key for key, _ in named}:
            raise InvalidInput("task", sorted(key for key, _ in named), f"the task of {self.path}: {sorted(found)}")
        rows = [found[key][0] if alone else found[key] for key, _ in named]
        for row, (key, leaf) in zip(rows, named, strict=True):
            if row.shape != leaf.shape:
                raise InvalidInput(f"task.{name} {key}".strip(), leaf.shape, f"{row.shape}, as it was saved")
        return structure.unflatten([jax.numpy.asarray(row) for row in rows])


def _load_arrays(file: Path) -> dict[str, np.ndarray]:
    try:
        return load_file(file)
    except (OSError, SafetensorError) as error:
        raise InvalidInput("run", str(file), f"a file that is as it was written ({error})") from None


def _no_history() -> History:
    none = np.zeros(0, np.int64)
    return History(none, none, none)


def load(run: str | Path, task: Task | None = None) -> Any:
    """Read a run folder: `.result` is what the verb returned, in the task's pytrees.

    Args:
        run: The folder that `save=` or `hyperpush run` has made.
        task: The task that it was run with, for results in its pytrees; without it arrays come by name.

    Raises:
        InvalidInput: It is no run folder, one of another format version, or of another task.
    """
    if not isinstance(run, str | Path):
        raise InvalidInput("run", type(run).__name__, "the name of a folder: hp.load(path, task=task)")
    if task is not None and not isinstance(task, Task):
        raise InvalidInput("task", task, "hp.Task(…), the one that was run, or None")
    path = Path(run)
    if (path / "seed-0").is_dir():
        raise InvalidInput("run", str(path), f"one of its runs, such as {path / 'seed-0'}: it holds several seeds")
    try:
        about = json.loads((path / saved.RESULT).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidInput("run", str(path), f"the folder of a finished run ({saved.RESULT}: {error})") from None
    if "class" not in about:
        if task is not None:
            raise InvalidInput("task", "a task", "nothing: this folder holds a study's result, not a verb's")
        return saved.load(path)
    if about.get("format") != FORMAT:
        raise InvalidInput("run", f"{path}, of format {about.get('format')}", f"a folder of format {FORMAT}")
    if task is not None and (task.privacy is None) != ("privacy" not in about):
        kind = "private" if "privacy" in about else "not private"
        raise InvalidInput("task", "a task that differs in privacy", f"the task that was run, which was {kind}")
    return Run(path, about, task)
