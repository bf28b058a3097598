"""Reading run folders, and the files of models in them; `hyperpush.runs.folder` says what a folder holds."""

import json
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from hyperpush import processes, registry
from hyperpush.costs import Costs
from hyperpush.errors import InvalidInput, unknown
from hyperpush.inner.base import LinkEstimates
from hyperpush.privacy.budget import Budget
from hyperpush.results import Estimate, History, Result, Solution, Training
from hyperpush.runs.events import read_events
from hyperpush.runs.folder import CALL, CONFIG, HISTORY, LINKS, METRICS, MODELS, RESULT
from hyperpush.status import Status
from hyperpush.task import Point, Task

FORMAT = 1  # of the folder of a verb
SETS = ("params", "hypers", "value")  # of models, that a verb's result has
BY_EXAMPLE = ("hypers", "value")  # which may have a number for each example, of which clients own different numbers
CLASSES: dict[str, type[Result]] = {"Training": Training, "Estimate": Estimate, "Solution": Solution}
T = TypeVar("T")


@dataclass(frozen=True)
class Run:
    """A finished run: what was asked for, its result, its events and its models. `hp.load` makes it.

    Attributes:
        path: Its folder.
        about: What `result.json` says.
        task: The task that a verb's run was loaded with; None: its arrays come by name.
    """

    path: Path
    about: Mapping[str, Any]
    task: Task | None = None

    @property
    def call(self) -> dict[str, Any]:
        """What was called, of a verb's run; else empty."""
        return _parse(self.path, CALL, json.loads) if (self.path / CALL).is_file() else {}

    @cached_property
    def config(self) -> dict[str, Any]:
        """The options of a study or spec; else empty."""
        return _parse(self.path, CONFIG, tomllib.loads) if (self.path / CONFIG).is_file() else {}

    @cached_property
    def events(self) -> list[dict[str, Any]]:
        """What the run has told, in order; none of a verb's run."""
        return read_events(self.path / METRICS) if (self.path / METRICS).is_file() else []

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The fields of the events, without their time and kind."""
        return [{name: each[name] for name in each if name not in ("time", "kind")} for each in self.events]

    @property
    def status(self) -> Status:
        """How a verb's or a spec's run ended."""
        return Status(**self._part("status"))

    @property
    def costs(self) -> Costs:
        """What a verb's or a spec's run cost."""
        return Costs(**self._part("costs"))

    def _part(self, name: str) -> dict[str, Any]:
        if name not in self.about:
            raise InvalidInput("run", str(self.path), f"the run of a verb or a spec: a study has no {name}")
        return self.about[name]

    @property
    def params(self) -> dict[str, PyTree]:
        """Every saved set of models, by name."""
        folder = self.path / MODELS
        return {each.name: self.models(each.name) for each in sorted(folder.iterdir())} if folder.is_dir() else {}

    def models(self, name: str) -> PyTree:
        """One saved set of models: nested dicts by path, whose arrays have the client axis first."""
        arrays = self.arrays(name)
        if set(arrays) == {""}:
            return arrays[""]
        tree: dict[str, Any] = {}
        for key, array in arrays.items():
            *parents, last = key.split("/")
            node = tree
            for parent in parents:
                node = node.setdefault(parent, {})
            node[last] = array
        return tree

    def arrays(self, name: str) -> dict[str, np.ndarray]:
        """One saved set of models: all owners' arrays by their path, owners on axis 0."""
        if not (self.path / MODELS / name).is_dir():
            raise unknown("models", name, (each.name for each in (self.path / MODELS).glob("*")))
        return load_models(self.path / MODELS / name, self.about.get("names"))

    @cached_property
    def result(self) -> Any:
        """What the verb returned, in the task's pytrees; without a task a verb's arrays by name, else `result.json`."""
        present = [name for name in SETS if (self.path / MODELS / name).is_dir()]
        if self.task is None:
            return {name: self.arrays(name) for name in present} if self.call else dict(self.about)
        task, trees = self.task, {name: self._tree(name, self.task) for name in present}
        params = task.problem.whole(trees["params"]) if "params" in trees else None
        at = task.at(params=trees.get("params"), hypers=trees.get("hypers"), point=self._point())
        if "privacy" in self.about:
            at = at.replace(spent=Budget.from_table(self.about["privacy"]["parts"]))
        kind, shared = CLASSES[self.about["class"]], (at, self.status, self.costs)
        if kind is Estimate:
            return Estimate(*shared, trees["value"])
        if kind is Training:
            return Training(*shared, params, self.history)
        empty = np.zeros(0, np.int64)
        history = self.history or History(empty, empty, empty)
        personal = tuple(self.about["personal"])
        return Solution(*shared, params, trees["hypers"], history, self.about["best_step"], personal)

    def _point(self) -> Point | None:
        """What the run left for the next one on its network; None if the network cannot be made again."""
        about = dict(self.about.get("point", {}))
        network = about.pop("network", None)
        if not isinstance(network, Mapping):
            return None
        links = None
        if (self.path / LINKS).is_dir():
            rows = load_models(self.path / LINKS, self.about["names"])
            own = {name: jnp.asarray(each[0] if self.about["alone"] else each) for name, each in rows.items()}
            links = LinkEstimates(**own)
        return Point(registry.build("networks", network, "network"), links, **about)

    @property
    def history(self) -> History | None:
        """Cost and metrics by step, of a verb's run."""
        if not (self.path / HISTORY).is_file():
            return None
        found = _load_arrays(self.path / HISTORY)
        metrics = {name.removeprefix("metrics/"): found.pop(name) for name in list(found) if "/" in name}
        return History(**found, metrics=metrics)

    def _tree(self, name: str, task: Task) -> PyTree:
        """A set of models as a pytree of the task's structure."""
        like = {"params": task.params, "hypers": task.hypers, "value": task.hypers}[name]
        found = self.arrays(name)
        leaves, structure = jax.tree_util.tree_flatten_with_path(like)
        named = [(leaf_name(path), leaf) for path, leaf in leaves]
        if set(found) != {key for key, _ in named}:
            raise InvalidInput("task", sorted(key for key, _ in named), f"the task of {self.path}: {sorted(found)}")
        rows = [found[key][0] if self.about["alone"] else found[key] for key, _ in named]
        for row, (key, leaf) in zip(rows, named, strict=True):
            if row.shape != leaf.shape:
                raise InvalidInput(f"task.{name} {key}".strip(), leaf.shape, f"{row.shape}, as it was saved")
        return structure.unflatten([jnp.asarray(row) for row in rows])


def load(run: str | Path, task: Task | None = None) -> Run:
    """Read a run folder: `.result` is what the verb returned, in the task's pytrees, or what the study found.

    Args:
        run: The folder that `save=`, `hyperpush run` or `hyperpush peer` has made.
        task: The task that it was run with, a peer's own one of a peer, for results in its pytrees. Without it arrays
            come by name.

    Raises:
        InvalidInput: It is no run folder, one of another format version, or of another task.

    Example:
        >>> import tempfile
        >>> import hyperpush as hp
        >>> task, folder = hp.tasks.quadratic(3, seed=0), tempfile.mkdtemp()
        >>> trained = hp.train(task, hp.SGP(5, 0.1), hp.networks.Ring(3), key=0, save=folder)
        >>> hp.load(folder, task=task).result.costs.rounds
        5
    """
    if not isinstance(run, str | Path):
        raise InvalidInput("run", type(run).__name__, "the name of a folder: hp.load(path, task=task)")
    if task is not None and not isinstance(task, Task):
        raise InvalidInput("task", task, "hp.Task(…), the one that was run, or None")
    path = Path(run)
    if (path / "seed-0").is_dir():
        raise InvalidInput("run", str(path), f"one of its runs, such as {path / 'seed-0'}: it holds several seeds")
    about = _parse(path, RESULT, json.loads)
    if "format" in about:
        check_format("run", path, about)
    if task is not None and about.get("class") not in CLASSES:
        raise InvalidInput(
            "run", f"{path}, which saved no models", "a run of train, hypergradient or solve; or no task"
        )
    if task is not None and (task.privacy is None) != ("privacy" not in about):
        kind = "private" if "privacy" in about else "not private"
        raise InvalidInput("task", "a task that differs in privacy", f"the task that was run, which was {kind}")
    if task is not None:
        _check_names(task, path, about)
    return Run(path, about, task)


def _check_names(task: Task, path: Path, about: Mapping[str, Any]) -> None:
    """Refuse a task of other clients, or of the same in another order: models are handed out by it."""
    own = task.names if task.owner is None else (task.names[task.owner],)
    saved = about.get("names", own)
    if tuple(saved) != tuple(own):
        raise InvalidInput("task.names", ", ".join(own), f"{', '.join(saved)}: the clients of {path}, in order")


def check_format(field: str, path: Path, about: Mapping[str, Any]) -> None:
    """Refuse a folder of another format version."""
    if about.get("format") != FORMAT:
        raise InvalidInput(field, f"{path}, of format {about.get('format')}", f"a folder of format {FORMAT}")


def _parse(path: Path, name: str, parse: Callable[[str], T]) -> T:
    try:
        return parse((path / name).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidInput("run", str(path), f"the folder of a finished run ({name}: {error})") from None


def leaf_name(path: tuple[Any, ...]) -> str:
    """What files call a leaf of a pytree."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def save_models(
    folder: Path,
    stacked: PyTree,
    first: bool = True,
    names: Sequence[str] | None = None,
    counts: Mapping[str, Sequence[int]] | None = None,
) -> None:
    """Write the arrays of a pytree whose leaves have the client axis first: one file for each client, keyed by path.

    Files are called after `names`, or `client-0`, …. Of arrays that are spread over processes each writes its own
    clients' rows; of others the `first` writes all. Of arrays in `counts`, a client's file has so many numbers.
    """
    counts = counts or {}
    found = jax.tree_util.tree_flatten_with_path(eqx.filter(stacked, eqx.is_array))[0]
    named = [(leaf_name(path), leaf) for path, leaf in found]
    clients = {leaf.shape[:1] for _, leaf in named}
    if len(dict(named)) < len(named) or len(clients) != 1 or clients == {()}:
        given = {key: leaf.shape for key, leaf in named}
        raise InvalidInput(
            f"models.{folder.name}", given, "arrays of different names with the same first axis, clients"
        )
    spread = any(processes.spread(leaf) for _, leaf in named)
    if not (first or spread):
        return
    folder.mkdir(parents=True, exist_ok=True)  # a party that was killed meanwhile writes again
    rows: dict[int, dict[str, np.ndarray]] = {}
    for key, leaf in named:
        each = processes.own_clients(leaf) if processes.spread(leaf) else enumerate(np.asarray(leaf))
        for client, row in each:
            rows.setdefault(client, {})[key] = row[: counts[key][client]] if key in counts else row
    for client, own in rows.items():
        if len(own) == len(named):  # of arrays that all hold, a process writes the rows of its own clients only
            # The copy makes rows contiguous, as the format needs; an array also where a client has a scalar.
            name = f"client-{client}" if names is None else names[client]
            save_file({k: np.array(v, order="C") for k, v in own.items()}, folder / owner_file(name))


def owner_file(name: str) -> str:
    """The file of an owner's model; whatever a file system could take for a path is written as %XX."""
    return f"{quote(name, safe=' +,=@~()').replace('.', '%2E')}.safetensors"


def load_models(folder: Path, names: Sequence[str] | None = None) -> dict[str, np.ndarray]:
    """A set of models as arrays by path, owners on axis 0, by `names`, by number or by file."""
    found = sorted(folder.iterdir())
    if names is None:
        numbered = [folder / f"client-{number}.safetensors" for number in range(len(found))]
        files = numbered if set(found) == set(numbered) else found
    else:
        files = [folder / owner_file(name) for name in names]
    owners = [_load_arrays(file) for file in files]
    if not owners or any(set(own) != set(owners[0]) for own in owners):
        raise InvalidInput("models", str(folder), "one readable file for each client, with the same arrays")
    by_example = folder.name in BY_EXAMPLE
    return {key: _stack(folder, [own[key] for own in owners], by_example) for key in owners[0]}


def _stack(folder: Path, rows: list[np.ndarray], by_example: bool) -> np.ndarray:
    """Owners on axis 0; of hypers, zeros behind those who have fewer numbers than others, as tasks have them."""
    same = {row.shape[1:] if by_example and row.ndim else row.shape for row in rows}
    if len(same) > 1:
        raise InvalidInput("models", str(folder), "files of one run, whose arrays have the same shapes")
    if by_example and rows[0].ndim:
        most = max(map(len, rows))
        rows = [np.pad(row, [(0, most - len(row)), *[(0, 0)] * (row.ndim - 1)]) for row in rows]
    return np.stack(rows)


def _load_arrays(file: Path) -> dict[str, np.ndarray]:
    try:
        return load_file(file)
    except (OSError, SafetensorError) as error:
        raise InvalidInput("run", str(file), f"one readable file for each client ({error})") from None
