"""Read a spec: a TOML file that describes a task, a method, a network, a key, and an engine.

    key = 0

    [task]                       # a ready-made task of `hp.tasks`, or module:function; its options
    name = "logistic"
    clients = 5
    seed = 0

    [network]                    # clients come from the task
    name = "random-directed"

    [method]                     # an inner solver, an estimator or an algorithm; its kind decides the verb
    name = "PDBO"
    steps = 5
    inner = { name = "SGP", steps = 600, step_size = 0.1 }
    hypergradient = { name = "HGP", steps = 20, pushes = 10, step_size = 0.2 }
    outer = { name = "adam", learning_rate = 0.1 }

Further tables are `[train]` (an inner solver that trains before an estimator), `[engine]`, `[metrics]` and `[hooks]`.
`[task.private]` makes the task private; it holds `clip`, and either `noise` or `epsilon` and `delta`. Every name is a
registered name or `module:Class`. A table without options may be its name alone: `network = "ring"`.

`verb = "influence"` scores training examples with an estimator. The table `[verb]` with `name = "influence"` also takes
options of `hp.influence.scores`. `start = "runs/mine"` continues from the end point of a finished run, and reuses its
link estimates if the network is the same. In a deployment, each party loads its own subfolder of `start`.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hyperpush import tasks
from hyperpush.base.annotations import check_option, options_of
from hyperpush.base.checks import check_arguments, check_integer, check_positive
from hyperpush.base.errors import HyperpushError, InvalidInput, unknown
from hyperpush.base.imports import load_function, plain_name
from hyperpush.engines.base import Engine
from hyperpush.engines.simulate import Simulate
from hyperpush.hypergradients.base import HypergradientEstimator
from hyperpush.influence.scores import scores
from hyperpush.inner.base import InnerSolver
from hyperpush.methods.base import Method
from hyperpush.methods.registry import base_of, build, construct, find, registered
from hyperpush.networks import Network
from hyperpush.runs.folder import MODELS
from hyperpush.spec.config import named_table
from hyperpush.task.task import Task
from hyperpush.verbs.budget import within_budget
from hyperpush.verbs.hooks import Hook
from hyperpush.verbs.hypergradient import hypergradient
from hyperpush.verbs.results import Result
from hyperpush.verbs.saved import load
from hyperpush.verbs.solve import solve
from hyperpush.verbs.train import train

NAMED = ("verb", "task", "network", "method", "train", "engine")  # tables that may be given as a name alone
TABLES = ("key", "precision", "start", "every", *NAMED, "metrics", "hooks")
METHODS = ("algorithms", "hypergradients", "inner", "baselines", "big_fed")  # kinds of methods that a file may name
VERBS = ("train", "hypergradient", "solve", "influence")
SCORING = ("damping", "parties", "validation", "curvature_steps")  # options of the verb "influence"


@dataclass(frozen=True)
class Spec:
    """The objects that a spec file describes."""

    verb: str
    task: Task
    method: Any  # a method of the kind that the verb takes
    network: Network
    key: int
    engine: Engine
    trainer: InnerSolver | None
    metrics: Mapping[str, Any]
    every: int | None
    hooks: tuple[Hook, ...]
    start: Path | None = None  # the folder of a finished run to start from
    changed: tuple[str, ...] = ()  # parts of the task that differ on purpose from the run in `start`
    scoring: Mapping[str, Any] = field(default_factory=dict)

    def run(self, engine: Engine | None = None, hooks: Sequence[Hook] = ()) -> Result:
        """Run the spec's verb and return its result.

        `engine` replaces the spec's engine, and `hooks` are added to its hooks.
        """
        options: dict[str, Any] = {"key": self.key, "engine": engine or self.engine, "hooks": (*self.hooks, *hooks)}
        measured = {"metrics": dict(self.metrics) or None, "every": self.every}
        task = self.task if self.start is None else _task_at(self.start, self.task, self.changed)
        if self.verb == "train":
            return train(task, self.method, self.network, **options, **measured)
        if self.verb == "solve":
            return solve(task, self.method, self.network, **options, **measured)
        if self.trainer is not None:
            task = train(task, self.trainer, self.network, **options).task
        if self.verb == "influence":
            return scores(task, self.method, self.network, **options, **self.scoring)
        return hypergradient(task, self.method, self.network, **options)


def read(values: Mapping[str, Any]) -> Spec:
    """Return the `Spec` with the objects that the tables of a file describe.

    Raises:
        InvalidInput: The file is invalid; the message names the dotted key, the given value and the allowed ones.
    """
    values = {key: named_table(each) if key in NAMED else each for key, each in values.items()}
    check_tables(values)
    table = dict(values["task"])
    private = table.pop("private", None)
    asked, name = values.get("verb"), values["method"].get("name")
    scored = isinstance(asked, Mapping) and asked.get("name") == "influence"
    if scored and method_kind(name, "method.name") != "hypergradients":
        raise InvalidInput("method", name, 'an estimator such as "automatic", which verb = "influence" needs')
    task, method = read_task(table), read_method(values["method"])
    network = read_network(values["network"], task.clients)
    if private is not None:
        task = _private_task(task, private, method, network)
    verb, scoring = _verb(values.get("verb"), method)
    start, changed = _start(values.get("start"))
    return Spec(
        verb=verb,
        task=task,
        method=method,
        network=network,
        key=check_integer("key", values.get("key", 0), minimum=0, maximum=2**32 - 1),
        engine=build("engines", values["engine"], "engine") if "engine" in values else Simulate(),
        trainer=build("inner", values["train"], "train") if "train" in values else None,
        metrics=_metrics(values.get("metrics", {})),
        every=values.get("every"),
        hooks=_hooks(values.get("hooks", {})),
        start=start,
        changed=changed,
        scoring=scoring,
    )


def check_tables(values: Mapping[str, Any]) -> None:
    """Raise InvalidInput for unknown keys, and if a required table is missing."""
    for key in values:
        if key not in TABLES:
            raise unknown(key, key, TABLES)
    for key in ("task", "network", "method"):
        if not isinstance(values.get(key), Mapping):
            raise InvalidInput(key, values.get(key), f"a table [{key}] with a name and options, or a name alone")


def read_task(table: Mapping[str, Any]) -> Task:
    """Make the task of a table: call the ready-made function or user's function that it names, with its options."""
    options = dict(table)
    name = options.pop("name", None)
    function = task_function(name)
    check_arguments("task", inspect.signature(function), (), options)
    given = {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}
    for key, value in given.items():
        check_option(f"task.{key}", options_of(function)[key].annotation, value)
    task = _task_of(str(name), function, given)
    if not isinstance(task, Task):
        raise InvalidInput("task.name", name, f"a function that returns hp.Task(…), not {type(task).__name__}")
    return task


def _private_task(task: Task, table: object, method: Method, network: Network) -> Task:
    """Return the private task that `[task.private]` describes.

    Its noise is the given noise, or the least noise that costs at most `epsilon` at `delta`.
    """
    if not isinstance(table, Mapping):
        raise InvalidInput("task.private", table, "a table with clip, and noise or epsilon")
    options = dict(table)
    epsilon, delta = options.pop("epsilon", None), options.pop("delta", None)
    if epsilon is None:
        if delta is not None:
            raise InvalidInput("task.private.epsilon", None, "a number above 0, as delta is given")
        return construct(task.private, options, "task.private")
    check_positive("task.private.epsilon", epsilon)
    options.setdefault("noise", {"name": "Gaussian" if delta else "Laplace", "scale": 1.0})
    return within_budget(epsilon, delta or None, construct(task.private, options, "task.private"), method, network)


def read_method(table: Mapping[str, Any], field: str = "method") -> Method:
    """Make the method that a table describes, of any kind."""
    return build(method_kind(table.get("name"), f"{field}.name"), table, field)


def method_kind(name: object, field: str) -> str:
    """Return the kind of a method, such as `inner` or `algorithms`; `name` is a registered name or `module:Class`."""
    known = {kind: registered(kind) for kind in METHODS}
    if isinstance(name, str) and ":" in name:
        found = find("methods", name, field)
        return next((kind for kind in METHODS if issubclass(found, base_of(kind))), "methods")
    for kind, classes in known.items():
        if name in classes or (isinstance(name, str) and plain_name(name) in map(plain_name, classes)):
            return kind
    raise unknown(field, str(name), [*(each for classes in known.values() for each in classes), "module:Class"])


def read_network(table: Mapping[str, Any], clients: int) -> Network:
    """Make the network that a table describes, with this number of clients."""
    if "clients" in table:
        raise InvalidInput("network.clients", table["clients"], f"no value, as the task has {clients} clients already")
    return build("networks", {**table, "clients": clients}, "network")


def task_function(name: object) -> Callable[..., Any]:
    """Return the function that makes a task: a function of `hp.tasks` with this name, or a user's `module:function`."""
    if isinstance(name, str) and ":" in name:
        return load_function("task.name", name)
    known = ready_made()
    if name not in known:
        raise unknown("task.name", str(name), [*known, "module:function"])
    return known[str(name)]


def ready_made() -> dict[str, Callable[..., Task]]:
    """Return the functions of `hp.tasks` that generate a task for a given number of clients, by name."""
    functions = {name: each for name, each in vars(tasks).items() if inspect.isfunction(each)}
    return {
        name: each
        for name, each in functions.items()
        if inspect.signature(each).return_annotation is Task and "clients" in inspect.signature(each).parameters
    }


def _task_of(name: str, function: Callable[..., Any], options: Mapping[str, Any]) -> Any:
    """Call the function of a task with a table's options; an error names the option by its dotted key."""
    try:
        return function(**options)
    except InvalidInput as error:
        if error.field.partition(".")[0] not in options:
            raise
        raise InvalidInput(f"task.{error.field}", error.given, error.allowed) from None
    except HyperpushError:
        raise
    except Exception as error:  # a user's function may raise anything
        said = f"{name}, which fails with {type(error).__name__}: {error}"
        raise InvalidInput("task.name", said, "a function that makes a task from the table's options") from error


def _verb(table: object, method: Method) -> tuple[str, dict[str, Any]]:
    """Return the name of the verb to run with this method, and the options of the table `[verb]`."""
    if not isinstance(table, Mapping | None):
        raise InvalidInput("verb", table, f"one of {', '.join(VERBS)}, or a table with a name and options")
    kinds = {InnerSolver: ("train",), HypergradientEstimator: ("hypergradient", "influence")}
    fitting = next((verbs for kind, verbs in kinds.items() if isinstance(method, kind)), ("solve",))
    options = dict(table or {})
    name = options.pop("name", fitting[0])
    if name not in VERBS:
        raise unknown("verb", str(name), VERBS)
    if name not in fitting:
        raise InvalidInput("verb", name, f"{' or '.join(fitting)} for {type(method).__name__}")
    for key, given in options.items():
        if name != "influence":
            raise InvalidInput(f"verb.{key}", given, f"no options for {name} here")
        if key not in SCORING:
            raise unknown(f"verb.{key}", key, SCORING)
    return name, options


def _start(given: object) -> tuple[Path | None, tuple[str, ...]]:
    """Return the folder of the finished run to start from, and the parts of the task that differ on purpose."""
    if given is None:
        return None, ()
    table = given if isinstance(given, Mapping) else {"run": given}
    run, changed = table.get("run"), table.get("changed", [])
    if not isinstance(run, str) or set(table) - {"run", "changed"} or not isinstance(changed, list):
        allowed = 'the folder of a finished run, or a table such as { run = "runs/mine", changed = ["train"] }'
        raise InvalidInput("start", given, allowed)
    return Path(run), tuple(changed)


def _task_at(start: Path, task: Task, changed: Sequence[str]) -> Task:
    """Return the task at the params and hypers of a finished run; each party loads its own subfolder."""
    path = start if task.owner is None else start / task.names[task.owner]
    if not (path / MODELS / "params").is_dir():
        raise InvalidInput("start", str(path), "the folder of a finished run that saved models: of train or solve")
    return load(path, task, changed=changed).result.task


def _metrics(table: object) -> dict[str, Any]:
    if not isinstance(table, Mapping):
        raise InvalidInput("metrics", table, "a table of metrics by name")
    found: dict[str, Any] = {}
    for name, given in table.items():
        if isinstance(given, Mapping):
            check = {key: key for key in given if key not in ("name", "on")}
            if check or "name" not in given:
                raise InvalidInput(
                    f"metrics.{name}", dict(given), 'a table such as { name = "module:function", on = "test" }'
                )
            metric = load_function(f"metrics.{name}.name", given["name"])
            found[name] = (given["on"], metric) if "on" in given else metric
        else:
            found[name] = load_function(f"metrics.{name}", given)
    return found


def _hooks(table: object) -> tuple[Hook, ...]:
    if not isinstance(table, Mapping):
        raise InvalidInput("hooks", table, "a table of hooks by name")
    found = []
    for name, given in table.items():
        each = given if isinstance(given, Mapping) else {"name": given}
        found.append(build("hooks", each, f"hooks.{name}"))
    return tuple(found)
