"""Results of the verbs: their values, a status that says how reliable they are, and their costs."""

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from importlib import import_module
from typing import Any, NamedTuple, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int, Num, PyTree

from hyperpush.base.errors import InvalidInput, NotConverged
from hyperpush.base.panels import Panel, Pictured
from hyperpush.base.status import Status, note_status
from hyperpush.data import sets
from hyperpush.networks.link_estimates import LinkEstimates
from hyperpush.task.task import Task
from hyperpush.verbs import result_panels as shown
from hyperpush.verbs.costs import Costs

AnyResult = TypeVar("AnyResult", bound="Result")
RESERVED = ("step", "rounds", "floats", "cost", "hypergradient_norm", "watched")  # columns of a history


class Own(NamedTuple):
    """One client's part of a result: its name, params and hypers."""

    name: str
    params: PyTree
    hyper: PyTree


@dataclass(frozen=True)
class History:
    """Measurements recorded during a run: one row for the start and one for every `every`-th step.

    If `hp.solve` chooses `every`, the last step also has a row. For all algorithms, a row measures the params together
    with the hypers for which these params were trained. Arrays have rows on axis 0 and clients on axis 1.

    Attributes:
        steps: The step of each row; 0 is the start.
        rounds: Communication rounds from the start to each row.
        floats: Numbers that each client has sent from the start to each row.
        recorded_cost: The values of `cost`; None for private runs and joint outer costs.
        metrics: Each client's own metrics, by name.
        hypers: Each client's hypers; None if they would take too much memory.
        hypergradient_norm: The norm of each client's hypergradient in the step that ended at the row. None for
            algorithms without a hypergradient.
        watched: The mean metric that early stopping used, the same at all clients; None without early stopping.
    """

    steps: Int[np.ndarray, " rows"]
    rounds: Num[np.ndarray, "..."]
    floats: Num[np.ndarray, "..."]
    recorded_cost: Float[np.ndarray, "..."] | None = None
    metrics: Mapping[str, Float[np.ndarray, "..."]] = field(default_factory=dict)
    hypers: PyTree = None
    hypergradient_norm: Float[np.ndarray, "..."] | None = None
    watched: Float[np.ndarray, "..."] | None = None

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def cost(self) -> Float[np.ndarray, "..."]:
        """Each client's outer cost in every row. Private runs and joint outer costs raise InvalidInput."""
        if self.recorded_cost is None:
            allowed = "a run whose outer cost is each client's own, on a task that is not private"
            raise InvalidInput("history.cost", "a history without costs", allowed)
        return self.recorded_cost

    def columns(self) -> dict[str, np.ndarray]:
        """Return the history as columns of means over clients, by name."""
        found: dict[str, Any] = {"step": self.steps, "rounds": self.rounds, "floats": self.floats}
        own = {"hypergradient_norm": self.hypergradient_norm, "watched": self.watched}
        more = {"cost": self.recorded_cost, **self.metrics, **own}
        for name, values in more.items():
            if values is not None:
                found[name] = values if values.ndim == 1 else np.asarray(values, np.float64).mean(axis=1)
        return found

    def to_pandas(self) -> Any:
        """Return the history as a pandas data frame with one row per recorded step and means over clients."""
        return table(self.columns())

    def panels(self) -> list[Panel]:
        """Return panels that show the cost, the metrics and the other columns by step, as lines."""
        spread = dict(self.metrics) if self.recorded_cost is None else {**self.metrics, "cost": self.recorded_cost}
        return shown.history_panels(self.columns(), spread)

    def __repr__(self) -> str:
        return f"History({len(self)} rows: {', '.join(self.columns())})"


def table(columns: Mapping[str, Sequence[Any] | np.ndarray]) -> Any:
    """Return a pandas data frame with these columns; raise InvalidInput if pandas is not installed."""
    try:
        pandas = import_module("pandas")
    except ImportError:
        raise InvalidInput("to_pandas", "no pandas", "an environment with pandas: pip install pandas") from None
    return pandas.DataFrame(dict(columns))


@dataclass(frozen=True)
class Result(Pictured):
    """Base class of the results of all verbs.

    Attributes:
        task: The task with the params and hypers that this run reached; pass it to the next verb.
        status: Whether the result converged, and why or why not.
        costs: Communication and computation of each client.
        seeds: Number of runs, which is the size of the leading axis of every array. 0 means one run without that axis.
    """

    task: Task
    status: Status
    costs: Costs
    seeds: int = field(default=0, kw_only=True)

    @property
    def _clients(self) -> int:
        """The axis of the clients in every array: 1 behind a seed axis, else 0."""
        return 1 if self.seeds else 0

    @property
    def mean(self: AnyResult) -> AnyResult:
        """The mean over seeds, a result of the same class.

        Verbs do not accept its `task`, because several runs lack a single end point.
        """
        return self._over_axis(np.mean)

    @property
    def spread(self: AnyResult) -> AnyResult:
        """The standard deviation over seeds, a result of the same class; 0 for one seed."""
        return self._over_axis(np.std)

    def _over_axis(self: AnyResult, reduce: Any) -> AnyResult:
        if not self.seeds:
            raise InvalidInput("seeds", None, "a result of several seeds: call the verb with seeds=")
        changes = {
            name: _each_array(lambda array: reduce(array, axis=0), getattr(self, name)) for name in _arrays(self)
        }
        return replace(self, **changes, seeds=0)

    @property
    def warnings(self) -> list[str]:
        """Reasons to doubt the result, taken from its status; empty if there are none."""
        return self.status.warnings

    @property
    def privacy(self) -> Any:
        """The `Budget` of this run and the runs before it on a private task; None if the task is not private."""
        return self.task.spent

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the clients, in the order of the client axis of every array."""
        return self.task.names if self.task.owner is None else (self.task.names[self.task.owner],)

    def facts(self) -> list[str]:
        """Return the facts that `repr` shows in addition to the status and the costs."""
        count = self.task.clients
        said = [f"{self.seeds} seeds"] if self.seeds else []
        said.append(f"{count} clients" if self.task.owner is None else f"client {self.names[0]!r}")
        if self.status.chosen:
            said.append(f"by {' and '.join(each.partition(':')[0] for each in self.status.chosen.split('; '))}")
        return said if self.privacy is None else [*said, str(self.privacy)]

    def __repr__(self) -> str:
        # Arrays are left out, so that the text stays short even with a million params.
        said = [", ".join(self.facts()), str(self.costs)]
        said = [*said, str(self.status)] if self.status.converged is False else [said[0], str(self.status), said[1]]
        return f"{type(self).__name__}({'; '.join(said)})"

    def _repr_html_(self) -> str:
        rows = {"clients": ", ".join(self.facts()), "status": str(self.status)}
        rows |= {"chosen": self.status.chosen} if self.status.chosen else {}
        rows |= {each.name.replace("_", " "): getattr(self.costs, each.name) for each in fields(Costs)}
        cells = "".join(
            f"<tr><th style='text-align:left'>{name}</th><td>{html.escape(str(value))}</td></tr>"
            for name, value in rows.items()
        )
        return f"<table><caption>{type(self).__name__}</caption>{cells}</table>"

    def panels(self) -> list[Panel]:
        """Return panels with the status in words, the costs, the values of the result, and a drawing of the network.

        Returns:
            Panels, each with a title, a kind and its numbers. A result of several seeds shows means over seeds.

        Example:
            >>> import hyperpush as hp
            >>> task, network = hp.tasks.quadratic(3, seed=0), hp.networks.Ring(3)
            >>> trained = hp.train(task, hp.SGP(steps=10, step_size=0.1), network, key=0)
            >>> [panel.kind for panel in trained.panels()]
            ['text', 'table', 'heat', 'network']
        """
        found: Result = self.mean if self.seeds else self
        point = self.task.point
        drawn = [] if point is None else [shown.network_panel(point.network, self.task.names)]
        about = [shown.status_panel(self.status), shown.costs_panel(self.costs), *shown.privacy_panel(self.privacy)]
        return [*about, *found.own_panels(), *drawn]

    def own_panels(self) -> list[Panel]:
        """Return the panels that only this class of results has; `panels` puts them between costs and network."""
        return []

    def by_client(self, title: str, tree: PyTree) -> list[Panel]:
        """Return panels of a tree with clients on axis 0, labeled by the clients' names."""
        stacked = tree if self.task.owner is None else jax.tree.map(lambda leaf: leaf[None], tree)
        return shown.by_client(title, self.names, stacked)

    def check(self: AnyResult, throw: bool) -> AnyResult:
        """Return the result; with `throw`, raise `NotConverged` if it did not converge."""
        if not self.seeds:
            note_status(self.status)
        if throw and self.status.converged is False:
            raise NotConverged(self)
        return self


@dataclass(frozen=True, repr=False)
class Training(Result):
    """Result of `hp.train`: the trained params of all clients.

    Attributes:
        params: Every client's params, with clients on axis 0.
        history: Metrics by step; None if `hp.train` got neither `metrics` nor `every`.

    Example:
        >>> import hyperpush as hp
        >>> task = hp.tasks.quadratic(3, seed=0)
        >>> trained = hp.train(task, hp.TreeNewton(), hp.networks.Ring(3), key=0)
        >>> print(trained.status)
        converged (tolerance)
    """

    params: PyTree
    history: History | None = None

    def facts(self) -> list[str]:
        residual = self.status.residual
        return [*super().facts(), *([] if residual is None else [f"inner residual {residual:.2g}"])]

    def own_panels(self) -> list[Panel]:
        history = [] if self.history is None else self.history.panels()
        return [*history, *self.by_client("Hypers by client", self.task.hypers)]

    @property
    def links(self) -> LinkEstimates | None:
        """The clients' estimates of their links; None if the method makes none.

        Hypergradient estimators that need these estimates read them from `task`.
        """
        return None if self.task.point is None else self.task.point.links

    def client(self, name: str | int) -> Own:
        """Return one client's params and hypers, by its name or number."""
        return own(self.task, name, self.params, self.task.hypers, (self._clients, 0))


@dataclass(frozen=True, repr=False)
class Estimate(Result):
    """Result of `hp.hypergradient`: the estimated hypergradient of every client.

    Attributes:
        value: For each client i, the derivative d F̄ / dλ_i of the mean outer cost F̄ by its own hypers λ_i. The pytree
            has the structure of `task.hypers`, with clients on axis 0.
        history: Recorded values by loop; empty without `record`.

    Example:
        >>> import hyperpush as hp
        >>> task, network = hp.tasks.quadratic(3, seed=0), hp.networks.Ring(3)
        >>> found = hp.hypergradient(task, hp.HGP(steps=20, pushes=5, step_size=0.2), network, key=0)
        >>> found.value.shape == task.hypers.shape
        True
    """

    value: PyTree
    history: Mapping[str, PyTree] = field(default_factory=dict)

    def facts(self) -> list[str]:
        squares = [np.sum(np.square(np.asarray(leaf, np.float64))) for leaf in jax.tree.leaves(self.value)]
        return [*super().facts(), f"norm {np.sqrt(sum(squares)):.4g}"]  # float32 would overflow above 1e19

    def own_panels(self) -> list[Panel]:
        return self.by_client("Hypergradient by client", self.value)


@dataclass(frozen=True, repr=False)
class Solution(Result):
    """Result of `hp.solve`: the params and hypers of all clients after a bilevel algorithm.

    Attributes:
        params: Every client's params, with clients on axis 0: the approximate inner solution for `hypers`.
        hypers: Every client's hypers, with clients on axis 0; with early stopping, the hypers of the best step.
        history: Cost, metrics, rounds and floats by step.
        best_step: The number of outer steps from the start to `hypers`.
        personal: Names of the hypers that each client kept for itself in a task with `common=True`.

    Example:
        >>> import hyperpush as hp
        >>> task, network = hp.tasks.quadratic(3, seed=0, common=True), hp.networks.Ring(3)
        >>> method = hp.algorithms.MDBO(steps=20, outer_step_size=0.05, inner_step_size=0.1)
        >>> found = hp.solve(task, method, network, key=0)
        >>> len(found.history), found.best_step
        (21, 20)
    """

    params: PyTree
    hypers: PyTree
    history: History
    best_step: int
    personal: tuple[str, ...] = ()

    @property
    def hyper(self) -> PyTree:
        """The common hyper of a task with `common=True`: the mean of `hypers` over clients.

        Entries named in `personal` are left out.
        """
        if not self.task.common:
            raise InvalidInput("hyper", "a task without common=True", "`hypers`: every client has its own")
        own, tree = self.personal, self.hypers
        tree = {name: each for name, each in tree.items() if name not in own} if own else tree
        return tree if self.task.owner is not None else jax.tree.map(lambda h: jnp.mean(h, axis=self._clients), tree)

    def client(self, name: str | int) -> Own:
        """Return one client's params and hypers, by its name or number."""
        return own(self.task, name, self.params, self.hypers, (self._clients, self._clients))

    def own_panels(self) -> list[Panel]:
        return [*self.history.panels(), *self.by_client("Hypers by client", self.hypers)]

    def facts(self) -> list[str]:
        said, cost = super().facts(), self.history.recorded_cost
        if cost is not None and len(cost):
            cost = np.asarray(cost, np.float64)
            cost = cost.mean(axis=0) if self.seeds else cost
            means = cost.reshape(len(cost), -1).mean(axis=1)
            row = int(np.searchsorted(self.history.steps, self.best_step, side="right")) - 1
            step = int(self.history.steps[row])
            at = "" if step == self.best_step else f" at step {step}"
            said.append(f"{self.best_step} steps, outer cost {means[0]:.5g} -> {means[row]:.5g}{at}")
        return said


def own(task: Task, name: str | int, params: PyTree, hypers: PyTree, axes: tuple[int, int] = (0, 0)) -> Own:
    """Return one client's part of stacked params and hypers; `axes` are their client axes."""
    number = task.client(name)
    if task.owner is not None:
        if number != task.owner:
            raise InvalidInput("client", name, f"{task.names[task.owner]!r}: the result holds only this client")
        return Own(task.names[number], params, hypers)

    def rows(tree: PyTree, axis: int) -> PyTree:
        return jax.tree.map(lambda leaf: leaf[(slice(None),) * axis + (number,)] if eqx.is_array(leaf) else leaf, tree)

    params, hypers = map(rows, (params, hypers), axes)
    return Own(task.names[number], params, sets.cut_padding(hypers, task.by_example, task.data.train, number, axes[1]))


def over_seeds(task: Task, results: Sequence[AnyResult]) -> AnyResult:
    """Return the results of several runs as one result with a leading seed axis.

    Its status is the worst of the runs, and each cost is the largest of the runs.
    """
    first, status = results[0], Status.of_all([each.status for each in results])
    numbers = [each.name for each in fields(Costs) if each.name != "accesses"]
    largest = {name: max(getattr(each.costs, name) for each in results) for name in numbers}
    changes = {
        name: _stack_arrays([getattr(result, name) for result in results])
        for name in _arrays(first)
        if getattr(first, name) is not None
    }
    costs = Costs(**largest, accesses=first.costs.accesses)
    return replace(
        first, task=task.replace(is_multi_seed=True), status=status, costs=costs, **changes, seeds=len(results)
    )


def _arrays(result: Result) -> list[str]:
    """Return the names of the fields of a result that hold arrays."""
    others = ("task", "status", "costs", "seeds", "best_step", "personal")
    return [each.name for each in fields(result) if each.name not in others]


def _each_array(f: Any, value: Any) -> Any:
    if isinstance(value, History):
        names = [each.name for each in fields(value) if each.name != "steps"]
        return replace(value, **{name: _each_array(f, getattr(value, name)) for name in names})
    return jax.tree.map(lambda leaf: f(np.asarray(leaf)) if eqx.is_array(leaf) else leaf, value)


def _stack_arrays(values: Sequence[Any]) -> Any:
    if isinstance(values[0], History):
        parts = {each.name: [getattr(value, each.name) for value in values] for each in fields(values[0])}
        shared = {"steps": parts.pop("steps")[0]}
        return replace(values[0], **shared, **{name: _stack_arrays(part) for name, part in parts.items()})
    return jax.tree.map(
        lambda *leaves: np.stack([np.asarray(leaf) for leaf in leaves]) if eqx.is_array(leaves[0]) else leaves[0],
        *values,
    )
