"""Read the tables of several parties and report their content."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import PRNGKeyArray

from hyperpush.base.checks import no_type_check
from hyperpush.base.errors import InvalidInput
from hyperpush.engines.base import Engine
from hyperpush.engines.simulate import Simulate
from hyperpush.networks import Network
from hyperpush.tables.scaling import constant_features
from hyperpush.tables.schema import Kind, Schema, make_schema
from hyperpush.tables.source import FORMS, Table, as_text, read_all, unread
from hyperpush.tables.task import TableTask, left_out, make_task, split_rows

FAR = 10.0  # a value is doubtful if its distance from all others is larger than this multiple of their range
SHOWN = 6  # number of names in a line


@dataclass(frozen=True, repr=False)
class Tables:
    """All parties' records as matrices with shared columns.

    Nothing is scaled or split; `task` does both.

    Attributes:
        names: The names of the parties.
        schema: The columns, label and classes that all tables share.
        inputs: Each party's features, [records, features], NaN where a value is missing.
        labels: Each party's labels: the number of each record's class, or the numeric labels.
        sources: Each party's file; without a file, the party's name.
        lines: The line of each record in its party's file; without a file, the number of the row from 0.
        warnings: Reasons for caution, one sentence each.

    Example:
        >>> import numpy as np
        >>> import hyperpush as hp
        >>> rows = np.arange(12.0).reshape(6, 2)
        >>> tables = hp.tables.read({"a": (rows, [0, 1, 0, 1, 0, 1]), "b": (rows + 1, [1, 1, 1, 0, 0, 0])}, label="y")
        >>> print(tables)
        Tables: 2 parties, 12 records, 2 features of 2 columns, label 'y' with classes 0, 1
          a: 6 records, label shares 50 / 50 %
          b: 6 records, label shares 50 / 50 %
    """

    names: tuple[str, ...]
    schema: Schema
    inputs: tuple[np.ndarray, ...]
    labels: tuple[np.ndarray, ...]
    sources: tuple[str, ...]
    lines: tuple[np.ndarray, ...]
    warnings: tuple[str, ...]

    @property
    def counts(self) -> tuple[int, ...]:
        """Number of records of each party."""
        return tuple(map(len, self.labels))

    @property
    def shares(self) -> np.ndarray:
        """The share of each class at each party, [parties, classes]."""
        size = len(self.schema.classes)
        return np.stack([np.bincount(own, minlength=size) / len(own) for own in self.labels])

    def take(self, rows: Sequence[np.ndarray]) -> "Tables":
        """Return tables with only these records of each party, such as all except held-out records.

        Args:
            rows: The numbers of each party's records.
        """
        picked: dict[str, Any] = {
            name: tuple(own[each] for own, each in zip(getattr(self, name), rows, strict=True))
            for name in ("inputs", "labels", "lines")
        }
        return replace(self, **picked)

    @no_type_check
    def task(
        self,
        network: Network,
        *,
        key: PRNGKeyArray | int,
        head: str | None = None,
        l2: float = 0.01,
        split: Sequence[float] = (0.6, 0.2, 0.2),
        weights: str = "examples",
        engine: Engine = Simulate(),
    ) -> TableTask:
        """Split and scale the records, and return the task of a linear model whose hypers are L2 rates.

        The key decides the split, in which all data sets have about equal class shares. Means and deviations of the
        training rows are averaged over the network; no rows are pooled. The task's hypers are the logarithms of the L2
        rates.

        Args:
            network: The links among the parties, one client per party.
            key: An integer or a JAX key; it determines the split and random links.
            head: `"softmax"` for classes, `"regression"` for numbers. None: the head for the label's kind.
            l2: The rate of the penalty ½·l2·‖w‖², which is added to the mean loss, above 0. Features have deviation 1.
            split: Shares of training, validation and test records, which sum to 1; the first two are above 0.
            weights: `"examples"`: all records have equal weight. `"parties"`: all parties have equal weight.
            engine: The engine that hosts the parties.

        Returns:
            A `TableTask`, a `Task` that keeps its `scaling`.

        Raises:
            InvalidInput: An argument is out of range, or a party has too few records.

        Example:
            >>> import numpy as np
            >>> import hyperpush as hp
            >>> rows = np.arange(20.0).reshape(10, 2)
            >>> tables = hp.tables.read({"a": (rows, [0, 1] * 5), "b": (rows + 1, [1, 0] * 5)}, label="y")
            >>> tables.task(hp.networks.Ring(2), key=0)
            Task(2 clients, 3 params each; train 6, validation 2, test 2 examples; the outer level fits 'validation')
        """
        sets = split_rows(self, split, key)
        made = make_task(self, sets, network, key=key, head=head, l2=l2, weights=weights, engine=engine)
        if names := left_out(self, made.scaling):
            text = f"Constant in the training rows and therefore left out: {', '.join(names)}."
            warnings.warn(text, stacklevel=2)
        return made

    def __repr__(self) -> str:
        schema = self.schema
        what = f"with classes {', '.join(map(str, schema.classes))}" if schema.classes else "with numbers"
        head = (
            f"Tables: {len(self.names)} parties, {sum(self.counts):,} records, {len(schema.features)} features of "
            f"{len(schema.columns)} columns, label {schema.label!r} {what}"
        )
        rows = [f"  {name}: {said}" for name, said in zip(self.names, self._party_facts(), strict=True)]
        kinds = [f"{column.name} ({_few(column.values)})" for column in schema.columns if column.values]
        rows += [f"  categories: {', '.join(kinds)}"] if kinds else []
        return "\n".join([head, *rows, *(f"  ! {each}" for each in self.warnings)])

    def _party_facts(self) -> list[str]:
        if not self.schema.classes:
            return [f"{len(own):,} records, mean label {own.mean():.4g}" for own in self.labels]
        return [
            f"{len(own):,} records, label shares {' / '.join(f'{100 * each:.0f}' for each in share)} %"
            for own, share in zip(self.labels, self.shares, strict=True)
        ]


@no_type_check
def read(
    given: Any,
    *,
    label: str,
    party: str | None = None,
    kind: Kind | None = None,
    categories: Sequence[str] = (),
) -> Tables:
    """Read the tables of several parties, match their columns by name, and report their content.

    A column becomes a category, with one feature per value, if at least a tenth of its values are text. A column with
    fewer text values raises an error that names the first one. Missing values get the shared mean, and one more feature
    is 1 where a value was missing.

    Args:
        given: A folder with one CSV or NPZ file per party; one file or data frame with a column that names the party;
            or a dict from party to file, data frame or arrays (X, y). CSV files need the extra `tables`.
        label: The name of the column to predict. For arrays (X, y), it is the name of y.
        party: The column that names the party, for one file or frame; None otherwise.
        kind: Kind of the label, `"classes"` or `"numbers"`. None: text, or at most 10 different whole numbers, are
            classes.
        categories: Names of columns whose numbers stand for categories.

    Returns:
        The `Tables`; `print` shows columns, parties, counts and warnings.

    Raises:
        InvalidInput: A value or column cannot be used; one line names the file, line and column.

    Example:
        >>> import numpy as np
        >>> import hyperpush as hp
        >>> rows = np.arange(12.0).reshape(6, 2)
        >>> hp.tables.read({"a": (rows, [1.5] * 6), "b": (rows, [2.5, 1] * 3)}, label="dose").schema.kind
        'numbers'
    """
    if not isinstance(label, str):
        raise InvalidInput("label", label, "the name of a column")
    if isinstance(given, str | Path) and not Path(given).exists():
        raise InvalidInput("tables", str(given), f"an existing path; {FORMS}")
    tables = read_all(given, label, party)
    if len(tables) < 2:
        raise InvalidInput("tables", f"one party, {tables[0].name!r}", "at least two parties")
    if isinstance(categories, str):
        raise InvalidInput("categories", categories, "a list of columns")
    schema = make_schema(tables, label, kind, tuple(categories))
    labeled, said = _drop_unlabeled(tables, label)
    inputs, labels = ([encode(each) for each in labeled] for encode in (schema.encode, schema.encode_labels))
    found = Tables(
        tuple(each.name for each in labeled),
        schema,
        tuple(inputs),
        tuple(labels),
        tuple(each.source for each in labeled),
        tuple(each.lines for each in labeled),
        (),
    )
    other = unread(given)
    said += [f"These files are not tables and are left out: {_few(other)}."] if other else []
    return replace(found, warnings=(*said, *_look(found)))


def _drop_unlabeled(tables: Sequence[Table], label: str) -> tuple[list[Table], list[str]]:
    """Return the tables without rows that lack a label, and warnings with the number of such rows."""
    found, said = [], []
    for table in tables:
        has = np.array([each is not None for each in as_text(table.columns[label])])
        if not has.any():
            raise InvalidInput(f"{table.source}, column {label!r}", "no labels", "at least one row with a label")
        if not has.all():
            said.append(f"{table.name}: {np.sum(~has)} rows without a label are left out.")
        found.append(table.take(np.nonzero(has)[0]))
    return found, said


def _look(tables: Tables) -> list[str]:
    """Return warnings on constant columns, missing values, outliers, similar names, and parties that lack a class."""
    pooled, said = np.concatenate(tables.inputs), []
    constant = [name for name, same in zip(tables.schema.features, constant_features(pooled), strict=True) if same]
    if constant:
        said.append(f"Constant and therefore left out: {', '.join(constant)}.")
    places = [(column, tables.schema.features.index(column.features[-1])) for column in tables.schema.columns]
    gaps = [f"{column.name} {_percent(pooled[:, place].mean())}" for column, place in places if column.missing]
    if gaps:
        said.append(f"Missing values, filled with the shared mean: {', '.join(gaps)}.")
    said += [*_far_values(tables), *_alike(tables), *_apart(tables)]
    if tables.schema.classes:
        for name, share in zip(tables.names, tables.shares, strict=True):
            lacks = [str(each) for each, part in zip(tables.schema.classes, share, strict=True) if part == 0]
            if lacks:
                said.append(f"{name} has no record of class {', '.join(lacks)}.")
    return said


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.005 else "under 1 %"


def _far_values(tables: Tables) -> list[str]:
    """Return a warning for each number far from all others of its column, such as a code for missing values."""
    places = {each.name: tables.schema.features.index(each.name) for each in tables.schema.columns if not each.values}
    numbers: dict[str, Sequence[np.ndarray]]
    numbers = {name: [own[:, place] for own in tables.inputs] for name, place in places.items()}
    if not tables.schema.classes:
        numbers[tables.schema.label] = tables.labels
    said = []
    for name, owned in numbers.items():
        for value, low, high in far_ends(np.concatenate(owned)):
            rows = [np.nonzero(own == value)[0] for own in owned]
            party = next(number for number, found in enumerate(rows) if len(found))
            first = f"{tables.sources[party]}, row {tables.lines[party][rows[party][0]]}"
            if Path(tables.sources[party]).suffix.lower() == ".csv":
                first = first.replace(", row ", ", line ")
            said.append(
                f"{name} is {value:g} in {sum(map(len, rows))} rows (first: {first}), far from all others, "
                f"{low:g} to {high:g}: empty the field if it stands for missing."
            )
    return said


def far_ends(values: np.ndarray) -> list[tuple[float, float, float]]:
    """Return the lowest or highest values that are far from the next value, as (value, lowest, highest of the others).

    A value is far if its distance exceeds `FAR` times the range of the others. At least three different values must be
    left.
    """
    found, rest = [], np.unique(values[~np.isnan(values)])
    while len(rest) > 3:
        above, below = rest[-1] - rest[-2], rest[1] - rest[0]
        end, rest = (rest[-1], rest[:-1]) if above > below else (rest[0], rest[1:])
        if max(above, below) <= FAR * (rest[-1] - rest[0]):
            break
        found.append((float(end), float(rest[0]), float(rest[-1])))
    return found


def _alike(tables: Tables) -> list[str]:
    """Return warnings on values of a category, or classes, that differ in capital letters only."""
    named = [(column.name, column.values) for column in tables.schema.columns]
    said = []
    for name, values in [*named, (tables.schema.label, tables.schema.classes)]:
        groups: dict[str, list[str]] = {}
        for value in map(str, values):
            groups.setdefault(value.casefold(), []).append(value)
        said += [f"{name}: {' and '.join(map(repr, own))} differ." for own in groups.values() if len(own) > 1]
    return said


def _apart(tables: Tables) -> list[str]:
    """Return warnings on categories of which a party shares no value with the others, such as yes and 1."""
    said = []
    for column in tables.schema.columns:
        if not column.values:
            continue
        first = tables.schema.features.index(column.features[0])
        used = np.array([np.any(own[:, first : first + len(column.values)] == 1, axis=0) for own in tables.inputs])
        for name, own, others in zip(tables.names, used, used.sum(0) - used, strict=True):
            if own.any() and not np.any(own & (others > 0)):
                values = [value for value, has in zip(column.values, own, strict=True) if has]
                said.append(f"{column.name}: {name} shares no value with the others ({_few(values)}).")
    return said


def _few(names: Sequence[str]) -> str:
    """Return names as one text; of many names, the first ones and the number of others."""
    return ", ".join(names) if len(names) <= SHOWN else f"{', '.join(names[:SHOWN])} and {len(names) - SHOWN} more"
