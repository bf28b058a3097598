"""Fit one linear model to the records of all parties, and predict labels of raw rows."""

import warnings
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PRNGKeyArray

from hyperpush.base import panels
from hyperpush.base.checks import check_positive, no_type_check
from hyperpush.base.errors import InvalidInput
from hyperpush.base.panels import Panel, Pictured
from hyperpush.base.status import Status
from hyperpush.engines.base import Engine
from hyperpush.engines.simulate import Simulate
from hyperpush.inner.tree_newton import TreeNewton
from hyperpush.networks import Exponential, Network
from hyperpush.tables.heads import LinearHead, probabilities
from hyperpush.tables.read import Tables
from hyperpush.tables.scaling import Scaling
from hyperpush.tables.schema import Schema
from hyperpush.tables.source import Table, read_one
from hyperpush.tables.task import TableTask, left_out, make_task, split_rows
from hyperpush.verbs import result_panels
from hyperpush.verbs.costs import Costs
from hyperpush.verbs.train import train

RATES = (1e-4, 1e-3, 1e-2, 0.1, 1.0)  # candidates for the L2 rate


@dataclass(frozen=True, repr=False)
class LinearModel(Pictured):
    """A linear model fitted to all parties' records, which predicts labels of raw rows.

    Attributes:
        schema: The columns that rows must have.
        scaling: Means and deviations by which the model scales rows.
        params: Coefficients of the scaled features, the intercept last. With k > 2 classes there are k − 1 rows, else
            there is one row.
        l2: The rate of the penalty.
        status: The status of the training.
        costs: Messages and computations of each party, including those for choosing the L2 rate.

    Example:
        >>> import numpy as np
        >>> import hyperpush as hp
        >>> rows = np.random.default_rng(0).normal(size=(40, 2))
        >>> own = rows[:, 0] > 0
        >>> tables = hp.tables.read({"a": (rows[:20], own[:20]), "b": (rows[20:], own[20:])}, label="y")
        >>> model = hp.tables.fit(tables, l2=0.01)
        >>> model.predict(np.array([[2.0, 0.0], [-2.0, 0.0]])).tolist(), model.status.converged
        ([1, 0], True)
    """

    schema: Schema
    scaling: Scaling
    params: np.ndarray
    l2: float
    status: Status
    costs: Costs

    def predict(self, rows: Any) -> np.ndarray:
        """Return the predicted class, or the predicted number, of each raw row.

        `rows` is a file, data frame, dict of columns, or matrix. A missing value counts as the mean. A Python warning
        names columns with missing values that had none in training.
        """
        scores = self._scores(self._read(rows, None))
        if self.schema.kind == "numbers":
            return self._numbers(scores)
        return np.array(self.schema.classes)[np.argmax(probabilities(scores), axis=1)]

    def predict_proba(self, rows: Any) -> np.ndarray:
        """Return the probability of each class, in the order of `schema.classes`, [rows, classes]."""
        if self.schema.kind == "numbers":
            raise InvalidInput("predict_proba", "a label of numbers", "predict: only classes have probabilities")
        return probabilities(self._scores(self._read(rows, None)))

    def score(self, rows: Any, labels: Any = None) -> float:
        """Return the share of correctly predicted classes, or R² for numbers, on raw rows.

        Args:
            rows: Raw rows in a form that `predict` takes.
            labels: One label per row; None if the rows have a column with the labels.
        """
        table = self._read(rows, labels)
        truth, scores = self.schema.encode_labels(table), self._scores(table)
        if self.schema.kind == "numbers":
            rest = truth - self._numbers(scores)
            return float(1 - np.sum(rest**2) / np.sum((truth - truth.mean()) ** 2))
        return float(np.mean(np.argmax(probabilities(scores), axis=1) == truth))

    def _read(self, rows: Any, labels: Any) -> Table:
        label = self.schema.label
        if isinstance(rows, np.ndarray | list):
            names = [column.name for column in self.schema.columns]
            matrix = rows if np.ma.isMaskedArray(rows) else np.asarray(rows)
            if matrix.ndim != 2 or matrix.shape[1] != len(names):
                raise InvalidInput("rows", f"shape {matrix.shape}", f"a matrix with {len(names)} columns: {names}")
            rows = {name: matrix[:, place] for place, name in enumerate(names)}
        table = read_one("rows", rows, label if labels is not None else None)
        if labels is None:
            return table
        if len(labels) != len(table):
            raise InvalidInput("labels", f"{len(labels)} labels", f"one for each of {len(table)} rows")
        own = read_one("labels", {label: np.asarray(labels)}, label).columns[label]
        return Table(table.name, table.source, {**table.columns, label: own}, table.lines)

    def _scores(self, table: Table) -> np.ndarray:
        encoded = self.schema.encode(table)
        self._note_gaps(encoded)
        inputs = self.scaling.apply(encoded)
        return inputs @ self.params[:, :-1].T + self.params[:, -1]

    def _note_gaps(self, encoded: np.ndarray) -> None:
        """Warn of missing values, which count as the mean, in columns that had none in training."""
        places = {name: place for place, name in enumerate(self.schema.features)}
        found = {
            column.name: int(np.isnan(encoded[:, places[column.features[0]]]).sum())
            for column in self.schema.columns
            if not column.missing
        }
        if gaps := [f"{name} in {count} rows" for name, count in found.items() if count]:
            text = f"missing values count as the mean, though training had none in these columns: {', '.join(gaps)}"
            warnings.warn(text, stacklevel=4)

    def _numbers(self, scores: np.ndarray) -> np.ndarray:
        mean, deviation = self.scaling.label
        return mean + deviation * scores[:, 0]

    def panels(self) -> list[Panel]:
        """Return the report's panels: the status, the costs, and the largest coefficients of the scaled features."""
        names = [*np.array(self.schema.features)[self.scaling.kept].tolist(), "intercept"]
        largest = np.sort(np.argsort(-np.abs(self.params).max(axis=0), kind="stable")[: result_panels.ENTRIES])
        names, values = [names[place] for place in largest], self.params[:, largest]
        more = self.params.shape[1] - len(largest)
        note = f"{more} more coefficients are smaller." if more else ""
        title = "Coefficients of the scaled features"
        if len(values) == 1:
            shown = panels.bars(title, names, {"": values[0]}, note=note)
        else:
            rows = list(map(str, self.schema.classes[:-1]))
            note = f"The last class, {self.schema.classes[-1]}, has coefficients 0. {note}".strip()
            shown = panels.heat(title, rows, names, values, row_label="class", column_label="feature", note=note)
        return [result_panels.status_panel(self.status), result_panels.costs_panel(self.costs), shown]

    def __repr__(self) -> str:
        return f"Model({self.schema.label!r}, l2 {self.l2:g}; {self.status}; {self.costs})"


@no_type_check
def fit(
    tables: Tables,
    network: Network | None = None,
    *,
    key: PRNGKeyArray | int = 0,
    l2: float | None = None,
    engine: Engine = Simulate(),
) -> LinearModel:
    """Fit one linear model to all parties' records: logistic, softmax or least squares, with an L2 penalty.

    Every record has the same weight. The result is the same as with one pooled table, although no rows are pooled.

    Args:
        tables: The result of `hp.tables.read`.
        network: The links among the parties. None: `hp.networks.Exponential` over the parties.
        key: An integer or a JAX key; it determines the split that chooses L2, and random links.
        l2: The rate of the penalty ½·l2·‖w‖², above 0. None takes the best of 1e-4, 1e-3, 0.01, 0.1 and 1 on a quarter
            of the records. The model is then fitted to all records.
        engine: The engine that hosts the parties.

    Returns:
        A `LinearModel` with `predict`, `predict_proba`, `score`, `status` and `costs`.

    Raises:
        InvalidInput: An argument is invalid; the message names it.

    Example:
        >>> import numpy as np
        >>> import hyperpush as hp
        >>> rows = np.random.default_rng(0).normal(size=(40, 2))
        >>> tables = hp.tables.read({"a": (rows[:20], rows[:20, 1]), "b": (rows[20:], rows[20:, 1])}, label="y")
        >>> round(hp.tables.fit(tables, l2=1e-3).score(rows, rows[:, 1]), 3)
        1.0
    """
    if not isinstance(tables, Tables):
        raise InvalidInput("tables", type(tables).__name__, "what hp.tables.read returns")
    check_positive("l2", l2, optional=True)
    network = Exponential(len(tables.names)) if network is None else network
    options: dict[str, Any] = {"key": key, "head": None, "weights": "examples", "engine": engine}
    with jax.enable_x64(True):
        before = Costs()
        if l2 is None:
            l2, before = _choose_rate(tables, network, options)
        every = [{"train": np.arange(count), "validation": np.arange(count)} for count in tables.counts]
        task = make_task(tables, every, network, l2=l2, **options)
        trained = train(task, TreeNewton(), network, key=key, engine=engine, runs=[task.hypers])
        params = np.asarray(trained.params)[0, 0]
    costs = before + task.scaling.costs + trained.costs
    return LinearModel(tables.schema, task.scaling, params, float(l2), trained.status, costs)


def _choose_rate(tables: Tables, network: Network, options: dict[str, Any]) -> tuple[float, Costs]:
    """Return the L2 rate with the least loss on a quarter of the records, and the costs of finding it.

    The models of all rates are trained together, in one run.
    """
    sets = split_rows(tables, (0.75, 0.25, 0.0), options["key"])
    task = make_task(tables, sets, network, l2=RATES[0], **options)
    if names := left_out(tables, task.scaling):
        text = f"Constant in the training rows and therefore left out while L2 is chosen: {', '.join(names)}."
        warnings.warn(text, stacklevel=3)
    rates = [np.full(len(tables.names), np.log(rate)) for rate in RATES]
    around = {"key": options["key"], "engine": options["engine"]}
    found = train(task, TreeNewton(), network, runs=rates, **around)
    losses = [_validation_loss(task, np.asarray(found.params)[k, 0]) for k in range(len(RATES))]
    return RATES[int(np.argmin(losses))], task.scaling.costs + found.costs


def _validation_loss(task: TableTask, params: np.ndarray) -> float:
    """Return the mean loss over all parties' validation records."""
    head: LinearHead = task.outer.head
    examples, counts = task.validation, None
    if hasattr(examples, "counts"):
        examples, counts = examples.examples, np.asarray(examples.counts)
    inputs, labels, _ = (np.asarray(each) for each in examples)
    counts = np.full(len(labels), labels.shape[1]) if counts is None else counts
    real = np.arange(labels.shape[1]) < counts[:, None]
    losses = head.losses(*map(jnp.asarray, (params, inputs[real], labels[real])))
    return float(losses.mean())
