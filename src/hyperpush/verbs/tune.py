"""Try many settings of a method in one compiled program, and choose the best on held-out data."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray, PyTree

from hyperpush.algorithms.base import Algorithm, BilevelState
from hyperpush.algorithms.stopping import check_choice
from hyperpush.base import panels
from hyperpush.base.checks import no_type_check
from hyperpush.base.errors import InvalidInput, unknown
from hyperpush.base.options import Configured
from hyperpush.base.panels import Panel, Pictured
from hyperpush.base.status import Status
from hyperpush.data.batches import Data, full_batch
from hyperpush.engines.compiled.compile import Fixed, call
from hyperpush.engines.simulate import Simulate, evaluate
from hyperpush.hypergradients.base import HypergradientEstimator
from hyperpush.hypergradients.recurrent import known_links
from hyperpush.inner.base import InnerSolver, InnerState
from hyperpush.methods.base import Method
from hyperpush.networks import Network
from hyperpush.programs import ProgramRecipe, program_of
from hyperpush.programs.report import Report
from hyperpush.task.problem import Cost
from hyperpush.task.task import Task
from hyperpush.verbs.call import last_point, run_keys
from hyperpush.verbs.certify import NOT_CERTIFIED, Certifier
from hyperpush.verbs.first_costs import check_first_costs
from hyperpush.verbs.fit import fit
from hyperpush.verbs.results import table

LARGE = (
    50_000_000  # settings run side by side as long as their params, over all clients, have at most this many numbers
)


_Points = tuple[PyTree, PyTree] | None  # params and hypers: settings on axis 0, keys on axis 1


class TriedSetting(NamedTuple):
    """One setting that was tried: its values, its score and its status."""

    values: Mapping[str, Any]
    score: float  # mean over clients and seeds; NaN if a run diverged
    by_seed: Float[np.ndarray, " seeds"]  # score of each seed, a mean over clients
    status: Status  # covers the estimates in all runs of the setting


@dataclass(frozen=True)
class Tuning(Pictured):
    """Result of `hp.tune`: the settings that were tried, and the best of them.

    Attributes:
        best: The method with the best setting.
        rows: All settings with their scores, in the order of the grid.
        on: The data set on which the scores were measured.
        mode: `"min"` if lower scores are better, `"max"` if higher scores are better.
    """

    best: Method
    rows: tuple[TriedSetting, ...]
    on: str
    mode: str

    @property
    def best_row(self) -> TriedSetting:
        """The best setting with its values, score and status."""
        return _best(self.rows, self.mode)

    @property
    def warnings(self) -> list[str]:
        """Reasons to doubt the best setting, taken from the status of its runs; empty if there are none."""
        return self.best_row.status.warnings

    def to_pandas(self) -> Any:
        """Return a pandas data frame with one row per setting."""
        names = self.rows[0].values
        columns = {name: [row.values[name] for row in self.rows] for name in names}
        converged = [row.status.converged for row in self.rows]
        return table({**columns, "score": [row.score for row in self.rows], "converged": converged})

    def panels(self) -> list[Panel]:
        """Return panels with the best setting, and with the score of each setting as bars and in a table."""
        labels = [", ".join(f"{name} {value}" for name, value in row.values.items()) for row in self.rows]
        better = "lower" if self.mode == "min" else "higher"
        best = f"Best of {len(self.rows)} settings: {labels[self.rows.index(self.best_row)]}."
        title, scores = f"Score on {self.on!r} by setting", [row.score for row in self.rows]
        marks = ["best" if row is self.best_row else "other" for row in self.rows]
        rows = [[*map(str, row.values.values()), row.score, str(row.status)] for row in self.rows]
        return [
            panels.text("Choice", best, f"A {better} score is better."),
            panels.bars(title, labels, {"score": scores}, marks=marks, note="Settings that diverged lack a bar."),
            panels.table("Settings", (*self.rows[0].values, "score", "status"), rows),
        ]

    def __repr__(self) -> str:
        best = ", ".join(f"{name} = {value}" for name, value in self.best_row.values.items())
        failed = sum(not np.isfinite(row.score) for row in self.rows)
        said = f"Tuning({len(self.rows)} settings; best {best}: {self.best_row.score:.5g} on {self.on!r}"
        said += f"; {failed} diverged" if failed else ""
        return f"{said}; {self.best_row.status})" if self.best_row.status.converged is False else f"{said})"


@no_type_check
def tune(
    task: Task,
    method: InnerSolver | Algorithm,
    network: Network,
    *,
    key: PRNGKeyArray | int,
    over: Mapping[str, Sequence[Any]],
    on: str,
    metric: Cost | None = None,
    mode: Literal["min", "max"] = "min",
    seeds: int | Sequence[int] = 1,
    engine: Simulate = Simulate(),
) -> Tuning:
    """Try a method with every combination of given option values, and choose the best on a data set.

    Settings that differ only in numbers such as step sizes, learning rates or L2 rates run side by side in one compiled
    program. Each number of steps, batch size or other structural option compiles a program of its own. All settings use
    the same random draws.

    **Use it** for options without a gradient, such as step sizes. **Avoid it** for many hyperparameters: a grid grows
    exponentially with their number, while a bilevel method takes them as `hypers`.

    Args:
        task: One client's costs and start, and all clients' data.
        method: The inner solver or algorithm to tune.
        network: The network: its links, and the rounds in which they are up.
        key: An integer or a JAX key.
        over: The values to try for each option, by its dotted name, such as
            `{"inner.step_size": [0.05, 0.1], "outer.learning_rate": [0.1]}`.
        on: The data set on which scores are measured. Choose one that neither level uses, such as `"holdout"`;
            `"test"` is not allowed.
        metric: A function `metric(params, hyper, batch)`; None uses the outer cost without its penalty.
        mode: `"min"` chooses the lowest score, `"max"` the highest.
        seeds: Number of runs per setting, at least 1, with keys split from `key`; or a list with one key per run.
            Scores are means over these runs.
        engine: `hp.Simulate(…)`; its `faults` may simulate unreliable links.

    Returns:
        A `Tuning` with `best`, `rows` and `to_pandas()`. Only the params of the best setting's first run are checked
        (`hp.Status`). For all other settings, `status.converged` is False if a run reports a failure, else None with
        the reason *not certified*.

    Raises:
        InvalidInput: An option does not exist, a value is out of range, the data set is not allowed, or every setting
            diverged.

    Example:
        >>> import hyperpush as hp
        >>> task, network = hp.tasks.quadratic(3, seed=0), hp.networks.Ring(3)
        >>> values = {"step_size": [0.01, 0.3]}
        >>> found = hp.tune(task, hp.SGP(20, 0.1), network, key=0, over=values, on="validation")
        >>> found.best.step_size, len(found.rows)
        (0.01, 2)
    """
    if isinstance(method, HypergradientEstimator):
        allowed = "an inner solver or a bilevel algorithm, whose runs can be scored"
        raise InvalidInput("method", type(method).__name__, allowed)
    if not isinstance(engine, Simulate):
        raise InvalidInput("engine", engine, "hp.Simulate(…): all settings run in one compiled program")
    kind = InnerSolver if isinstance(method, InnerSolver) else Algorithm
    key = fit(task, method, network, engine, kind=kind, key=key, verb=tune).key
    check_choice("on", on, task)
    if mode not in ("min", "max"):
        raise InvalidInput("mode", mode, "'min' or 'max'")
    if task.privacy is not None:
        raise InvalidInput(
            "task", "a private task", "a task without privacy: choosing on data reveals something of them"
        )
    if metric is not None:
        task.check_metric("metric", metric, on)
    check_first_costs(task)
    settings = _grid(method, over)
    keys = jnp.stack([key] if seeds == 1 else run_keys(key, seeds))
    found = _scores([each for _, each in settings], network, task, on, metric or task.problem.outer, keys, engine)
    # A setting's score is NaN if any of its runs diverged.
    rows = tuple(
        TriedSetting(
            values,
            float(own.mean()) if np.all(np.isfinite(own)) else float("nan"),
            own,
            status.judged(NOT_CERTIFIED) if status.converged else status,
        )
        for (values, _), (own, status, _) in zip(settings, found, strict=True)
    )
    best = _best(rows, mode)
    if not np.isfinite(best.score):
        given = f"{len(rows)} settings, all of which diverged"
        raise InvalidInput("over", given, "smaller step sizes among the values")
    place = next(number for number, row in enumerate(rows) if row is best)
    chosen, (_, status, kept) = settings[place][1], found[place]
    if kept is not None:
        points, row, adapted = kept
        # Indexing on the host avoids a compilation.
        params, hypers = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf)[row, 0]), points)
        after = task.at(params=params, hypers=hypers)
        judged = _judge(Certifier(after, chosen, adapted, network, engine, keys[0]), status)
        rows = (*rows[:place], best._replace(status=judged), *rows[place + 1 :])
    return Tuning(chosen, rows, on, mode)


def _judge(certifier: Certifier, status: Status) -> Status:
    """Return the status of the best setting after checking its params, which were not checked during the runs."""
    if isinstance(certifier.given, InnerSolver):
        return certifier.judge_params(status)
    return status.judged(certifier.judge_params(Status()))


def _best(rows: Sequence[TriedSetting], mode: str) -> TriedSetting:
    sign = 1 if mode == "min" else -1
    return min(rows, key=lambda row: sign * row.score if np.isfinite(row.score) else np.inf)


def _grid(method: Method, over: Mapping[str, Sequence[Any]]) -> list[tuple[dict[str, Any], Method]]:
    """Return every combination of option values, each with the method that has these values."""
    if not isinstance(over, Mapping) or not over:
        raise InvalidInput("over", over, 'a dict such as {"step_size": [0.1, 0.2]}')
    for name, values in over.items():
        if not isinstance(name, str):
            raise InvalidInput("over", name, "dotted names of options, such as inner.step_size")
        if isinstance(values, str) or not isinstance(values, Sequence | np.ndarray) or not len(values):
            raise InvalidInput(f"over.{name}", values, "a list of at least one value")
    settings = []
    for chosen in itertools.product(*over.values()):
        values, changed = dict(zip(over, chosen, strict=True)), method
        for name, value in values.items():
            changed = with_option(changed, name, value, f"over.{name}")
        settings.append((values, changed))
    return settings


def with_option(method: Any, name: str, value: Any, field: str) -> Any:
    """Return the method with `value` for the option of this dotted name; `field` names the option in errors."""
    first, _, rest = name.partition(".")
    options = method.options() if isinstance(method, Configured) else {}
    if first not in options:
        raise unknown(field, first, options)
    if rest:
        value = with_option(options[first], rest, value, field)
    return method.with_options(**{first: value})


def _scores(
    methods: Sequence[Method], network: Network, task: Task, on: str, metric: Cost, keys: Array, engine: Simulate
) -> list[tuple[Float[np.ndarray, " seeds"], Status, tuple[_Points, int, Method] | None]]:
    """Return, for every method, its scores for all keys, its status, and where its final params and hypers are.

    Methods of equal structure form a group and share a program. The third part of a result is a tuple: the final params
    and hypers of the group, the method's row in them, and the method as bound to the network. The params and hypers are
    None if a group's params exceed `LARGE` numbers.
    """
    bound = [each.bind(network, engine, task) for each in methods]
    recipes = [program_of(each, task.problem).traceable() for each in bound]
    numbers, rest = zip(*(eqx.partition(recipe, eqx.is_array) for recipe in recipes), strict=True)
    groups: dict[Any, list[int]] = {}
    for place in range(len(methods)):
        groups.setdefault((jax.tree.structure(numbers[place]), rest[place]), []).append(place)
    size = sum(leaf.size for leaf in jax.tree.leaves(task.params))
    found: dict[int, Any] = {}
    for places in groups.values():
        stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *(numbers[place] for place in places))
        states = _first_states(bound[places[0]], network, task)
        at_once = max(1, min(len(places) * len(keys), LARGE // max(size, 1)))
        keep = len(places) * len(keys) * size <= LARGE
        options = on, metric, at_once, engine, keep
        group = _Group(stacked, rest[places[0]], Fixed(network), states, task.data, keys, *options)
        level = engine.level_of(recipes[places[0]], network, states, task.data, runs=len(places) * len(keys))
        scores, reports, points = call(_run_group, group, level=level)
        for row, place in enumerate(places):
            report = jax.tree.map(lambda leaf, row=row: leaf[row], reports)
            point = None if points is None else (points, row, bound[place])
            found[place] = np.asarray(scores[row], np.float64), Status() if report is None else report.status(), point
    return [found[place] for place in range(len(methods))]


class _Group(NamedTuple):
    """Inputs of one program that runs all settings of equal structure."""

    stacked: ProgramRecipe  # the arrays of all settings, stacked on axis 0
    rest: ProgramRecipe  # everything except the arrays, which is the same for all settings
    network: Fixed  # static, because the network's tree is planned on the host
    states: PyTree
    data: Data
    keys: Array
    on: str
    metric: Cost
    at_once: int  # number of runs that are computed side by side
    engine: Simulate
    keep: bool  # True to return the final params and hypers


def _run_group(group: _Group, donated: None) -> tuple[Float[Array, "settings seeds"], Report | None, _Points]:
    """Return the mean metric over clients, the reports, and the kept params and hypers, for every setting and key."""
    keys, engine = group.keys, group.engine

    def score(place: Int[Array, ""]) -> tuple[Float[Array, ""], Report | None, _Points]:
        recipe = eqx.combine(jax.tree.map(lambda leaf: leaf[place // len(keys)], group.stacked), group.rest)
        options = {"clients_per_batch": engine.clients_per_batch, "faults": engine.faults}
        network, key = group.network.value, keys[place % len(keys)]
        found, _ = evaluate(recipe, network, group.states, group.data, key, **options)
        problem = recipe.parts[1]

        def of_client(params: PyTree, hyper: PyTree, examples: PyTree) -> Float[Array, ""]:
            return problem.measure(group.metric, params, hyper, full_batch(examples))

        mean = jnp.mean(jax.vmap(of_client)(found.params, found.hyper, group.data.sets[group.on]))
        return mean, getattr(found, "report", None), (found.params, found.hyper) if group.keep else None

    settings = jax.tree.leaves(group.stacked)[0].shape[0]
    found = jax.lax.map(score, jnp.arange(settings * len(keys)), batch_size=group.at_once)
    return jax.tree.map(lambda leaf: leaf.reshape(settings, len(keys), *leaf.shape[1:]), found)


def _first_states(method: Method, network: Network, task: Task) -> InnerState | BilevelState:
    """Return the initial states of all clients for a bound method."""
    if not isinstance(method, Algorithm):
        return InnerState(task.params, task.hypers)
    links = known_links(method, network, last_point(task, network), task)
    counter, report = jnp.full(task.clients, method.steps, jnp.int32), Report.none((task.clients,))
    judge = jnp.zeros(task.clients, bool)  # only the best setting is judged, at its end
    return BilevelState(task.params, task.hypers, links, counter, report, judge=judge)
