"""Keep the run of a verb in a folder (`save=`).

The same call again resumes the run or returns its result. Another call with the same folder raises InvalidInput.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, TypeVar

import equinox as eqx
import jax
import numpy as np
from jaxtyping import PRNGKeyArray
from safetensors.numpy import save_file

from hyperpush.base import processes
from hyperpush.base.errors import InvalidInput
from hyperpush.base.files import as_path
from hyperpush.base.fingerprint import fingerprint
from hyperpush.base.version import __version__
from hyperpush.data import sets
from hyperpush.data.batches import Ragged
from hyperpush.methods import registry
from hyperpush.methods.base import Method
from hyperpush.networks import Network
from hyperpush.runs.checkpoints import Policy
from hyperpush.runs.checkpoints.journal import values_digest
from hyperpush.runs.folder import CALL, HISTORY, LINKS, MODELS, RunFolder, is_new, make_folder
from hyperpush.runs.lifecycle import Lifecycle
from hyperpush.runs.models import BY_EXAMPLE, leaf_name, save_models
from hyperpush.runs.run import StudyRun
from hyperpush.task.task import Task
from hyperpush.verbs.results import History, Result, Solution
from hyperpush.verbs.saved import FORMAT, SETS, check_format, load
from hyperpush.verbs.task_digests import digests_of

R = TypeVar("R", bound=Result)


def describe(
    verb: str, task: Task, method: Method, network: Network, key: PRNGKeyArray, **options: Any
) -> dict[str, Any]:
    """Return the data that identify a call, in a form that JSON can store: names, options, and digests of arrays."""
    parts = {"inner": task.inner, "outer": task.outer, "penalty": task.penalty, "outer_penalty": task.outer_penalty}
    rows = task.clients if task.owner is None else 1
    arrays = (task.params, task.hypers, task.data.sets)
    stacked = arrays if task.owner is None else jax.tree.map(lambda leaf: leaf[None], arrays)
    return {
        "format": FORMAT,
        "verb": verb,
        "method": _table_or_fingerprint(method),
        "network": _table_or_fingerprint(network),
        "key": np.asarray(jax.random.key_data(key)).tolist(),
        "names": list(task.names) if task.owner is None else [task.names[task.owner]],
        "task": {name: fingerprint(part) for name, part in parts.items() if part is not None},
        **({} if task.privacy is None else {"private": str(task.privacy)}),
        **{name: values_digest(part, rows) for name, part in zip(("params", "hypers"), stacked, strict=False)},
        "data": {name: values_digest(part, rows) for name, part in stacked[2].items()},
        **{name: value for name, value in options.items() if value is not None},
    }


def _table_or_fingerprint(given: Method | Network) -> dict[str, Any] | str:
    try:
        return registry.table(given)
    except InvalidInput:  # an option is a function or an object of another library
        return fingerprint(given)


def keep(save: str | Path, call: Mapping[str, Any], task: Task, compute: Callable[[], R]) -> R:
    """Return the result of a call that is kept in the folder `save`: load a finished run, resume or start it."""
    path, as_read = as_path("save", save), json.loads(json.dumps(call))
    if not is_new(path, "save"):
        if not (path / CALL).is_file():
            raise InvalidInput("save", str(path), "a new or empty folder, or one that the same call has made")
        _refuse_other(path, path / CALL, as_read)
        return load(path, task, changed=("params", "hypers")).result  # the comparison of calls has covered the start

    def interrupted(error: BaseException) -> None:
        error.add_note(f"The same call, with save={str(save)!r}, continues this run from its last checkpoint.")

    life = Lifecycle(RunFolder(path, "save"), Policy(), interrupted=interrupted)
    work = life.folder.work
    make_folder(work, "save")
    with life.hold():
        if (work / CALL).is_file():
            _refuse_other(path, work / CALL, as_read)
        with life.attempt():
            life.begin(CALL, json.dumps(call, indent=1))
            with life.checkpoints():
                result = compute()
            write_arrays(work, result, processes.first_process())
            life.keep(json.dumps(summarize(result), indent=1))
    return result


def _refuse_other(path: Path, file: Path, call: Mapping[str, Any]) -> None:
    """Raise InvalidInput if a folder belongs to another call; the message names the first difference."""
    before = json.loads(file.read_text(encoding="utf-8"))
    check_format("save", path, before)
    name, was, now = _difference("", before, dict(call))
    if name:
        given = f"{path}, where {name} was {_short(was)}"
        raise InvalidInput("save", given, f"another folder: here {name} is {_short(now)}")


def _difference(name: str, was: object, now: object) -> tuple[str, object, object]:
    """Return the first difference with its dotted name; an empty name if the two are equal."""
    if isinstance(was, dict) and isinstance(now, dict):
        for key in {**was, **now}:
            found = _difference(f"{name}.{key}" if name else key, was.get(key), now.get(key))
            if found[0]:
                return found
        return "", None, None
    return ("", None, None) if was == now else (name, was, now)


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 100 else text[:97] + "…"


def summarize(result: Result) -> dict[str, Any]:
    """Return the content of `result.json`: all of a result except its arrays."""
    about = {"format": FORMAT, "class": type(result).__name__, "names": list(result.names), "version": __version__}
    about["task"] = digests_of(result.task, [name for name in SETS if hasattr(result, name)])
    about |= {"costs": asdict(result.costs), "status": result.status.as_json(), "alone": result.task.owner is not None}
    if result.privacy is not None:
        budget = result.privacy
        about["privacy"] = {"releases": dict(budget.releases), "parts": budget.to_table(), "assumes": budget.assumes}
    if isinstance(result, Solution):
        about |= {"best_step": result.best_step, "personal": list(result.personal)}
    point = result.task.point
    if point is not None:
        network = _table_or_fingerprint(point.network)
        about["point"] = {"network": network, "step": point.step, "iteration": dict(point.iteration)}
    return about


def save_result(run: StudyRun, result: Result) -> None:
    """Save the models and the history of a verb's result in a run's folder, for `hp.load(path, task=task)`."""
    if run.writes or processes.count() > 1:
        write_arrays(run.work, result, run.writes)


def write_arrays(folder: Path, result: Result, writes: bool = True) -> None:
    """Write a result's models, one file per set, and its history.

    If arrays are spread over several processes, each process writes its own clients' models. All other files are
    written by the process with `writes`.
    """
    point, counts = result.task.point, _count_rows(result.task)
    trees = {folder / MODELS / name: getattr(result, name, None) for name in SETS}
    for path, tree in {**trees, folder / LINKS: None if point is None else point.links}.items():
        if tree is not None:
            arrays = eqx.filter(tree, eqx.is_array)
            stacked = arrays if result.task.owner is None else jax.tree.map(lambda leaf: leaf[None], arrays)
            save_models(path, stacked, writes, result.names, counts if path.name in BY_EXAMPLE else None)
    history = getattr(result, "history", None)
    if isinstance(history, History) and writes:
        found = {f"metrics/{name}": values for name, values in history.metrics.items()}
        for each in fields(history):
            value = getattr(history, each.name)
            if each.name not in ("metrics", "hypers") and value is not None:
                found[each.name] = value
        save_file({name: np.ascontiguousarray(value) for name, value in found.items()}, folder / HISTORY)


def _count_rows(task: Task) -> dict[str, Sequence[int]]:
    """Return, for each leaf of the hypers with one row per example, the number of examples of each client.

    The result is empty if the hypers lack such leaves or all clients have equally many examples.
    """
    train = task.data.train
    counts = sets.example_counts(train).tolist() if any(task.by_example) and isinstance(train, Ragged) else []
    if task.owner is not None or len(counts) != task.clients:  # one of several processes sees only some counts
        return {}
    leaves = jax.tree_util.tree_leaves_with_path(task.hypers)
    return {leaf_name(path): counts for (path, _), rows in zip(leaves, task.by_example, strict=True) if rows}
