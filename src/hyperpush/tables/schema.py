"""Turn columns into a matrix of features that is the same for all parties, and labels into classes or numbers."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from hyperpush.base.errors import InvalidInput
from hyperpush.tables.source import Table, as_number, as_text

Kind = Literal["classes", "numbers"]
MOST_VALUES = 50  # most values of a category, and most classes of a label
MOST_CLASSES = 10  # number of different whole numbers up to which a label is taken as classes
TEXT = 0.1  # share of text values from which a column is a category
# Numbers with separators, such as 1,200 and 0,5
SEPARATED = re.compile(r"[-+]?[0-9]{1,3}([.,'’ \u00a0\u202f]?[0-9]{3})*([.,][0-9]+)?")


@dataclass(frozen=True)
class Column:
    """A column of the files, and the features that it becomes.

    Attributes:
        name: The column's name.
        values: The sorted values of a category, which become one feature each; empty for numbers.
        missing: True if values are missing at any party. Then one more feature is 1 where a value is missing.
    """

    name: str
    values: tuple[str, ...] = ()
    missing: bool = False

    @property
    def features(self) -> list[str]:
        """Names of the features that the column becomes."""
        found = [f"{self.name}={value}" for value in self.values] or [self.name]
        return [*found, f"{self.name} is missing"] if self.missing else found

    def encode(self, table: Table) -> np.ndarray:
        """Return the column's features for all rows of a table, [rows, features]; NaN where a value is missing."""
        own = table.columns[self.name]
        made = self._encode_category(table) if self.values else numbers_of(table, self.name)[:, None]
        if not self.missing:
            return made
        gone = np.array([each is None for each in as_text(own)], float)
        return np.concatenate([made, gone[:, None]], axis=1)

    def _encode_category(self, table: Table) -> np.ndarray:
        own, known = as_text(table.columns[self.name]), {value: number for number, value in enumerate(self.values)}
        made = np.zeros((len(own), len(self.values)))
        for row, value in enumerate(own):
            if value is None:
                made[row] = np.nan
            elif value in known:
                made[row, known[value]] = 1
            else:
                raise InvalidInput(table.place(row, self.name), value, f"one of {', '.join(self.values)}")
        return made


@dataclass(frozen=True)
class Schema:
    """The columns that all parties share, and their label.

    Attributes:
        columns: The columns in the order of the first file.
        label: The name of the label.
        kind: `"classes"` or `"numbers"`.
        classes: The sorted union of all parties' classes; empty for numbers.
    """

    columns: tuple[Column, ...]
    label: str
    kind: Kind
    classes: tuple[Any, ...] = ()

    @property
    def features(self) -> tuple[str, ...]:
        """Names of all features."""
        return tuple(name for column in self.columns for name in column.features)

    def encode(self, table: Table) -> np.ndarray:
        """Return the features of all rows of a table; raise `InvalidInput` for a table with other columns."""
        check_columns(table, [column.name for column in self.columns], self.label)
        return np.concatenate([column.encode(table) for column in self.columns], axis=1)

    def encode_labels(self, table: Table) -> np.ndarray:
        """Return the number of each row's class, or the numeric label."""
        if self.label not in table.columns:
            raise InvalidInput("labels", None, f"one label per row, or a column {self.label!r}")
        if self.kind == "numbers":
            return numbers_of(table, self.label)
        known = {str(value): number for number, value in enumerate(self.classes)}
        found = as_text(table.columns[self.label])
        for row, value in enumerate(found):
            if value not in known:
                raise InvalidInput(table.place(row, self.label), value, f"one of the classes {', '.join(known)}")
        return np.array([known[str(value)] for value in found])


def make_schema(tables: Sequence[Table], label: str, kind: Kind | None, categories: Sequence[str]) -> Schema:
    """Return the schema of all parties' tables; errors name the file, line and column of an unusable value."""
    for table in tables:
        if label not in table.columns:
            raise InvalidInput(f"{table.source}, label", label, f"one of its columns: {', '.join(table.columns)}")
    names = [name for name in tables[0].columns if name != label]
    if not names:
        raise InvalidInput(tables[0].source, "no column beside the label", "at least one")
    for table in tables:
        check_columns(table, names, label, tables[0].source)
    for name in categories:
        if name not in names:
            raise InvalidInput("categories", name, f"columns: {', '.join(names)}")
    found, classes = _label(tables, label, kind)
    return Schema(tuple(_make_column(tables, name, name in categories) for name in names), label, found, classes)


def check_columns(table: Table, names: Sequence[str], label: str, like: str = "the other tables") -> None:
    """Raise `InvalidInput` for a table that lacks a column or has an additional one."""
    for name in names:
        if name not in table.columns:
            raise InvalidInput(f"{table.source}, column {name!r}", "missing", f"the columns of {like}")
    for name in table.columns:
        if name not in names and name != label:
            raise InvalidInput(f"{table.source}, column {name!r}", "a column of its own", f"the columns of {like}")


def numbers_of(table: Table, name: str) -> np.ndarray:
    """Return a column as numbers, NaN where a value is missing; raise `InvalidInput` for text and infinity."""
    own = table.columns[name]
    if own.dtype != object:
        made = own
    else:
        found = [np.nan if each is None else as_number(each) for each in own]
        if None in found:
            row = found.index(None)
            raise InvalidInput(table.place(row, name), own[row], "a number or an empty field, as in most rows")
        made = np.array(found, np.float64)
    if np.any(np.isinf(made)):
        row = int(np.nonzero(np.isinf(made))[0][0])
        raise InvalidInput(table.place(row, name), str(own[row]), "a finite number")
    return made


def _make_column(tables: Sequence[Table], name: str, category: bool) -> Column:
    pooled = [value for table in tables for value in as_text(table.columns[name])]
    present = [value for value in pooled if value is not None]
    missing = len(present) < len(pooled)
    if not category and _share_of_text(present) < TEXT:
        for table in tables:
            numbers_of(table, name)
        return Column(name, (), missing)
    if not category:
        _refuse_separators(tables, name, "categories=[…] with this column")
    values = sorted(set(present), key=_order)
    if len(values) > MOST_VALUES:
        seen: set[str | None] = set()
        for table in tables:
            for row, value in enumerate(as_text(table.columns[name])):
                seen |= {value} - {None}
                if len(seen) > MOST_VALUES:
                    given = f"value number {len(seen)}, {value!r}"
                    allowed = f"a category of at most {MOST_VALUES} values; dates as numbers"
                    raise InvalidInput(table.place(row, name), given, allowed)
    return Column(name, tuple(values), missing)


def _label(tables: Sequence[Table], label: str, kind: Kind | None) -> tuple[Kind, tuple[Any, ...]]:
    present = [value for table in tables for value in as_text(table.columns[label]) if value is not None]
    counts = Counter(present)
    if kind is None:
        _refuse_separators(tables, label, "kind='classes'")
        whole = all((number := as_number(value)) is not None and number.is_integer() for value in counts)
        kind = "classes" if _share_of_text(present) >= TEXT or (whole and len(counts) <= MOST_CLASSES) else "numbers"
    if kind not in ("classes", "numbers"):
        raise InvalidInput("kind", kind, "'classes', 'numbers' or None")
    if kind == "numbers":
        for table in tables:
            numbers_of(table, label)
        if len(counts) < 2:
            raise InvalidInput(f"label {label!r}", f"{len(counts)} values in all files", "numbers that vary")
        return kind, ()
    if len(counts) < 2:
        raise InvalidInput(f"label {label!r}", f"{len(counts)} classes in all files", "at least two classes")
    if len(counts) > MOST_VALUES:
        raise InvalidInput(f"label {label!r}", f"{len(counts)} classes", f"at most {MOST_VALUES}; or kind='numbers'")
    return kind, tuple(_plain(value) for value in sorted(counts, key=_order))


def _refuse_separators(tables: Sequence[Table], name: str, otherwise: str) -> None:
    """Raise `InvalidInput` if all text values of a column are numbers with decimal commas or thousands separators."""
    found = [(table, row, value) for table in tables for row, value in enumerate(as_text(table.columns[name])) if value]
    text = [each for each in found if as_number(each[2]) is None]
    if text and all(SEPARATED.fullmatch(value) for _, _, value in text):
        table, row, value = text[0]
        allowed = f"numbers with a decimal point and no other separators; or {otherwise}"
        raise InvalidInput(table.place(row, name), value, allowed)


def _share_of_text(present: Sequence[str]) -> float:
    return sum(as_number(value) is None for value in present) / max(len(present), 1)


def _order(value: str) -> tuple[bool, float, str]:
    """Return a sorting key: numbers first, by size, then text."""
    number = as_number(value)
    return (number is None, number or 0.0, value)


def _plain(value: str) -> Any:
    """Return a class as a number if its text is a number in its usual form, else as text."""
    number = as_number(value)
    if number is None or as_text([number]) != [value]:
        return value  # such as "01", which stays text
    return int(number) if number.is_integer() else number
