"""Read run folders and the models in them; `hyperpush.runs.folder` lists the content of a folder."""

import json
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from hyperpush.base import panels
from hyperpush.base.errors import InvalidInput, unknown
from hyperpush.base.files import as_path
from hyperpush.base.locks import in_use, is_held
from hyperpush.base.panels import Panel, Pictured
from hyperpush.base.status import Status
from hyperpush.methods import registry
from hyperpush.networks.link_estimates import LinkEstimates
from hyperpush.runs.events import read_events
from hyperpush.runs.folder import CALL, CONFIG, FIGURES, HISTORY, LINKS, METRICS, MODELS, RESULT, RunFolder
from hyperpush.runs.models import leaf_name, load_arrays, load_models
from hyperpush.task.task import LastPoint, Task
from hyperpush.verbs import result_panels as shown
from hyperpush.verbs.budget import Budget
from hyperpush.verbs.costs import Costs
from hyperpush.verbs.results import Estimate, History, Result, Solution, Training
from hyperpush.verbs.task_digests import check_same_task

FORMAT = 2  # version of the format of folders that verbs write
SETS = ("params", "hypers", "value")  # possible sets of models in the folder of a verb's run
CLASSES: dict[str, type[Result]] = {"Training": Training, "Estimate": Estimate, "Solution": Solution}
# For each class of results, the sets of models that are required to read it.
NEEDED: dict[type[Result], tuple[str, ...]] = {
    Training: ("params",),
    Estimate: ("value",),
    Solution: ("params", "hypers"),
}
T = TypeVar("T")


@dataclass(frozen=True)
class Run(Pictured):
    """A finished run, read from its folder by `hp.load`: its arguments, result, events and models.

    Attributes:
        path: The run's folder.
        about: The content of `result.json`.
        task: The task that `hp.load` was called with; None if there was none, in which case arrays come by name.
    """

    path: Path
    about: Mapping[str, Any]
    task: Task | None = None

    @property
    def call(self) -> dict[str, Any]:
        """The arguments of a verb's run, as `call.json` holds them; empty for other runs."""
        return _parse(self.path, CALL, json.loads) if (self.path / CALL).is_file() else {}

    @cached_property
    def config(self) -> dict[str, Any]:
        """The options of a study or spec; empty for a verb's run."""
        return _parse(self.path, CONFIG, tomllib.loads) if (self.path / CONFIG).is_file() else {}

    @cached_property
    def events(self) -> list[dict[str, Any]]:
        """The events of the run in the order of writing; empty for a verb's run."""
        return read_events(self.path / METRICS) if (self.path / METRICS).is_file() else []

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The recorded values of each event in `events`, without its time and kind."""
        return [{name: each[name] for name in each if name not in ("time", "kind")} for each in self.events]

    @property
    def status(self) -> Status:
        """Return the status of the run; raise InvalidInput if `result.json` lacks it, as for some studies."""
        return Status(**self._part("status"))

    @property
    def costs(self) -> Costs:
        """Return the communication and computation of the run; raise InvalidInput for studies, which lack them."""
        return Costs(**self._part("costs"))

    def _part(self, name: str) -> dict[str, Any]:
        if name not in self.about:
            raise InvalidInput("run", str(self.path), f"the run of a verb or a spec: a study lacks {name}")
        return self.about[name]

    @property
    def params(self) -> dict[str, PyTree]:
        """All saved sets of models, by name (such as `params` and `hypers`)."""
        folder = self.path / MODELS
        return {each.name: self.models(each.name) for each in sorted(folder.iterdir())} if folder.is_dir() else {}

    def models(self, name: str) -> PyTree:
        """Return one saved set of models as nested dicts by path, with clients on axis 0 of every array."""
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
        """Return one saved set of models as a flat dict of arrays by path, with clients on axis 0 of every array."""
        if not (self.path / MODELS / name).is_dir():
            raise unknown("models", name, (each.name for each in (self.path / MODELS).glob("*")))
        return load_models(self.path / MODELS / name, self.about.get("names"))

    @cached_property
    def result(self) -> Any:
        """The result of the run.

        For a verb's run that was loaded with a task, this is the result object, in the task's pytrees. For a verb's run
        without a task, it is a dict of arrays by name. For a study, it is the content of `result.json`.
        """
        present = [name for name in SETS if (self.path / MODELS / name).is_dir()]
        if self.task is None:
            return {name: self.arrays(name) for name in present} if self.call else dict(self.about)
        task, trees = self.task, {name: self._tree(name, self.task) for name in present}
        params = task.problem.whole(trees["params"]) if "params" in trees else None
        at = task._moved(params=trees.get("params"), hypers=trees.get("hypers"), point=self._point())
        if "privacy" in self.about:
            at = at.replace(spent=Budget.from_table(self.about["privacy"]["parts"]))
        kind, shared = CLASSES[self.about["class"]], (at, self.status, self.costs)
        for name in NEEDED[kind]:
            if name not in trees:
                raise InvalidInput("run", f"{self.path}, which lacks models/{name}", "the unchanged folder of a run")
        if kind is Estimate:
            return Estimate(*shared, trees["value"])
        if kind is Training:
            return Training(*shared, params, self.history)
        empty = np.zeros(0, np.int64)
        history = self.history or History(empty, empty, empty)
        personal = tuple(self.about["personal"])
        return Solution(*shared, params, trees["hypers"], history, self.about["best_step"], personal)

    def _point(self) -> LastPoint | None:
        """Return the end point of the run, from which the next run on its network continues.

        None if the folder does not describe a network that can be rebuilt.
        """
        about = dict(self.about.get("point", {}))
        network = about.pop("network", None)
        if not isinstance(network, Mapping):
            return None
        links = None
        if (self.path / LINKS).is_dir():
            rows = load_models(self.path / LINKS, self.about["names"])
            own = {name: jnp.asarray(each[0] if self.about["alone"] else each) for name, each in rows.items()}
            links = LinkEstimates(**own)
        return LastPoint(registry.build("networks", network, "network"), links, **about)

    @property
    def history(self) -> History | None:
        """Cost and metrics by step of a verb's or a spec's run; None if the run did not record them."""
        if not (self.path / HISTORY).is_file():
            return None
        found = load_arrays(self.path / HISTORY)
        metrics = {name.removeprefix("metrics/"): found.pop(name) for name in list(found) if "/" in name}
        return History(**found, metrics=metrics)

    def panels(self) -> list[Panel]:
        """Return panels of everything that the folder holds.

        These are the status, costs, history, hypers by client and network of a verb's run, or a study's rows and
        figures.
        """
        if self.task is not None:
            return self.result.panels()
        found: list[Panel] = []
        if "status" in self.about:
            found.append(shown.status_panel(self.status))
        if "costs" in self.about:
            found.append(shown.costs_panel(self.costs))
        if self.history is not None:
            found += self.history.panels()
        titles = {"hypers": "Hypers by client", "value": "Hypergradient by client"}
        for name in (each for each in titles if (self.path / MODELS / each).is_dir()):
            found += shown.by_client(titles[name], self.about["names"], self.arrays(name))
        found += [panels.image(each.stem, each) for each in sorted((self.path / FIGURES).glob("*.png"))]
        found += _rows_panel(self.about.get("rows"))
        network = self.about.get("point", {}).get("network")
        if isinstance(network, Mapping):
            made = registry.build("networks", dict(network), "network")
            found.append(shown.network_panel(made, self.about["names"]))
        return found

    def _tree(self, name: str, task: Task) -> PyTree:
        """Return a saved set of models as a pytree with the structure of the task's params or hypers."""
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


def _rows_panel(rows: Any) -> list[Panel]:
    """Return the rows of a study's result as a table of their numbers and words."""
    rows = [each for each in rows or [] if isinstance(each, Mapping)]
    names = dict.fromkeys(name for row in rows for name, value in row.items() if isinstance(value, str | int | float))
    cells = [
        [value if isinstance(value := row.get(name), str | int | float) else None for name in names] for row in rows
    ]
    return [panels.table("Rows", list(names), cells)] if rows else []


def load(run: str | Path, task: Task | None = None, *, changed: Sequence[str] = ()) -> Run:
    """Read a run folder and return a `Run`, whose `result` is the result of the verb or study.

    Args:
        run: The folder that `save=`, `hyperpush run` or `hyperpush peer` has made.
        task: The task of the run (for a peer, the peer's own task); the result then has its pytrees. Its costs and data
            must equal those of the run. None returns arrays by name.
        changed: Names of parts of the task that differ from the run on purpose, to continue from its end point on
            cleaned data or with another loss. Allowed are names of data sets such as `"train"`, the costs `"inner"`,
            `"outer"`, `"penalty"` and `"outer_penalty"`, and starts that the run did not save (`"params"`, `"hypers"`).
            The result's `status` still describes the old parts.

    Raises:
        InvalidInput: The folder is not a run folder, has another format version, or belongs to another task. The
            message names the differences.

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
    path = as_path("run", run)
    if task is not None and not isinstance(task, Task):
        raise InvalidInput("task", task, "hp.Task(…), the one that was run, or None")
    if (path / "seed-0").is_dir():
        raise InvalidInput("run", str(path), f"one of its runs, such as {path / 'seed-0'}: it holds several seeds")
    _refuse_unfinished(path)
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
        if "task" in about:
            check_same_task(path, about["task"], task, changed)
    elif changed:
        raise InvalidInput("changed", list(changed), "() without a task: nothing is compared")
    return Run(path, about, task)


def _refuse_unfinished(path: Path) -> None:
    """Raise InvalidInput if the run was interrupted or is still running; the message says how to continue it."""
    folder = RunFolder(path)
    if folder.finished or not folder.work.is_dir():
        return
    if is_held(folder.lock):
        raise in_use("run", path)
    how = f"hyperpush resume {path}" if (folder.work / CONFIG).is_file() else f"the same call with save={str(path)!r}"
    raise InvalidInput("run", f"{path}, an interrupted run", f"a finished run: {how} continues this one")


def _check_names(task: Task, path: Path, about: Mapping[str, Any]) -> None:
    """Raise InvalidInput unless the task has the run's clients in the same order, by which models are assigned."""
    own = task.names if task.owner is None else (task.names[task.owner],)
    saved = about.get("names", own)
    if tuple(saved) != tuple(own):
        raise InvalidInput("task.names", ", ".join(own), f"{', '.join(saved)}: the clients of {path}, in order")


def check_format(field: str, path: Path, about: Mapping[str, Any]) -> None:
    """Raise InvalidInput if a folder has another format version."""
    if about.get("format") != FORMAT:
        raise InvalidInput(field, f"{path}, of format {about.get('format')}", f"a folder of format {FORMAT}")


def _parse(path: Path, name: str, parse: Callable[[str], T]) -> T:
    try:
        return parse((path / name).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidInput("run", str(path), f"the folder of a finished run ({name}: {error})") from None
