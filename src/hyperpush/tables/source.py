"""Read raw tables of parties from CSV and NPZ files, data frames and arrays, with the origin of each row."""

import csv
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hyperpush.base.checks import require
from hyperpush.base.errors import InvalidInput

FORMS = "a folder or file (CSV, NPZ), or {name: file, data frame or (X, y)}"
FILES = (".csv", ".npz")
PAGES = (".html", ".json", ".toml", ".md")  # files without records, which may be in a folder of tables
PLAIN = re.compile(r"[-+]?(0|[1-9][0-9]*)([.][0-9]*)?")  # a number that is written as usual; 01 is not
EXACT = 2**53  # larger whole numbers are not exact as floats
Values = np.ndarray  # floats with NaN, or objects: text, numbers, None


@dataclass(frozen=True)
class Table:
    """One party's rows with unchanged values.

    Attributes:
        name: The party's name.
        source: The file that errors name; without a file, the party's name.
        columns: The values of each column by name, one per row. They are floats with NaN, or objects with None, where a
            value is missing.
        lines: The line of each row in the file; without a file, the number of the row from 0.
    """

    name: str
    source: str
    columns: Mapping[str, Values]
    lines: np.ndarray

    def __len__(self) -> int:
        return len(self.lines)

    def place(self, row: int, column: str | None = None) -> str:
        """Return the file, the line and the column of a row or value, for messages."""
        unit = "line" if Path(self.source).suffix.lower() == ".csv" else "row"
        found = f"{self.source}, {unit} {self.lines[row]}"
        return found if column is None else f"{found}, column {column!r}"

    def take(self, rows: np.ndarray) -> "Table":
        """Return the table with only these rows."""
        return Table(self.name, self.source, {name: own[rows] for name, own in self.columns.items()}, self.lines[rows])


def read_all(given: Any, label: str, party: str | None) -> list[Table]:
    """Return the tables of all parties in the given order; files of a folder are ordered by name."""
    if isinstance(given, str | Path):
        return _read_path(Path(given), label, party)
    if isinstance(given, Mapping) and given:
        if party is not None:
            raise InvalidInput("party", party, "None: the dict names the parties")
        _refuse_repeats("tables", [str(name) for name in given], "a party")
        return [read_one(str(name), each, label) for name, each in given.items()]
    if hasattr(given, "columns") and party is not None:
        return _by_party(_from_frame("frame", given), party)
    raise InvalidInput("tables", type(given).__name__, FORMS)


def read_one(name: str, given: Any, label: str | None) -> Table:
    """Return one party's table, from a file, a data frame, (X, y), or a bare X for predictions."""
    if isinstance(given, str | Path):
        path = Path(given)
        return _from_npz(name, path, label) if path.suffix.lower() == ".npz" else _from_csv(name, path)
    if hasattr(given, "columns") and hasattr(given, "__getitem__"):
        return _from_frame(name, given)
    if isinstance(given, Mapping):
        return _table(name, name, {str(key): _column(each) for key, each in given.items()}, 0)
    if isinstance(given, tuple) and len(given) == 2:
        return _from_arrays(name, name, *given, label)
    if isinstance(given, np.ndarray | list):
        return _from_arrays(name, name, given, None, label)
    raise InvalidInput(f"tables[{name!r}]", type(given).__name__, "a file, a data frame, or arrays (X, y)")


def _read_path(path: Path, label: str, party: str | None) -> list[Table]:
    if path.is_dir():
        if party is not None:
            raise InvalidInput("party", party, f"None: each file of {path} is a party")
        files = sorted(each for each in path.iterdir() if each.suffix.lower() in FILES)
        if not files:
            raise InvalidInput("tables", str(path), "a folder with one CSV or NPZ file per party")
        _refuse_repeats(str(path), [tidy(file.stem) for file in files], "one file per party")
        return [read_one(tidy(file.stem), file, label) for file in files]
    if party is None:
        raise InvalidInput("party", None, f"the column of {path.name} that names the party, or a folder of files")
    return _by_party(read_one(path.stem, path, label), party)


def _by_party(table: Table, party: str) -> list[Table]:
    """Split a table into one table per party, which the column `party` names."""
    if party not in table.columns:
        raise InvalidInput("party", party, f"a column of {table.source}: {', '.join(table.columns)}")
    names = as_text(table.columns[party])
    if None in names:
        raise InvalidInput(table.place(names.index(None), party), "an empty field", "the name of a party")
    rest = {name: own for name, own in table.columns.items() if name != party}
    order = np.array(names)
    return [
        Table(str(name), table.source, rest, table.lines).take(np.nonzero(order == name)[0])
        for name in dict.fromkeys(names)
    ]


def unread(given: Any) -> list[str]:
    """Return the names of files in a folder of tables that cannot be read as tables."""
    if not isinstance(given, str | Path) or not Path(given).is_dir():
        return []
    found = (each for each in Path(given).iterdir() if each.is_file() and not each.name.startswith("."))
    return sorted(each.name for each in found if each.suffix.lower() not in (*FILES, *PAGES))


def _refuse_repeats(place: str, names: Sequence[str], allowed: str) -> None:
    """Raise `InvalidInput` if a name of a party or column occurs twice."""
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise InvalidInput(place, f"{twice[0]!r} twice", f"each name once, as the name of {allowed}")


def _from_csv(name: str, path: Path) -> Table:
    """Return the table of a CSV file, with every field as text; pandas decides which values are missing."""
    pandas = require("pandas", "tables")
    header, lines = _check_fields(path)
    try:
        frame = pandas.read_csv(path, dtype=str, skip_blank_lines=False, encoding="utf-8-sig", index_col=False)
    except (OSError, ValueError, UnicodeError) as error:  # pandas' parser errors are ValueErrors
        raise _unreadable(path, error) from None
    frame.columns = header
    filled = ~frame.isna().all(axis=1).to_numpy()
    columns = {each: _column(frame[each].to_numpy(dtype=object)[filled]) for each in header}
    return _table(name, path.name, columns, 0, lines[filled])


def _unreadable(path: Path, error: Exception) -> InvalidInput:
    said = str(error).strip().replace("\n", " ")
    return InvalidInput(str(path), said, "a CSV file in UTF-8 with a header and at least one row")


def _check_fields(path: Path) -> tuple[list[str], np.ndarray]:
    """Return the header, and the line of each row; raise `InvalidInput` for rows with more or fewer fields.

    Without this check, pandas would shift the columns of longer rows, and fill shorter rows.
    """
    lines: list[int] = []
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = csv.reader(file)
            header = [tidy(each) for each in next(rows, [])]
            start = rows.line_num
            for row in rows:
                if row and len(row) != len(header):
                    wanted = f"{len(header)}, as in the header"
                    raise InvalidInput(f"{path.name}, line {start + 1}", f"{len(row)} fields", wanted)
                lines.append(start + 1)
                start = rows.line_num
    except (OSError, UnicodeError, csv.Error) as error:
        raise _unreadable(path, error) from None
    for other, sign in ((";", "';'"), ("\t", "tabs")):
        if len(header) == 1 and other in header[0]:
            raise InvalidInput(f"{path.name}, line 1", f"fields separated by {sign}", "commas, and decimal points")
    if "" in header:
        given = f"no name for column {header.index('') + 1}"
        raise InvalidInput(f"{path.name}, line 1", given, "a name for each column (pandas: to_csv(…, index=False))")
    if header:
        _refuse_repeats(f"{path.name}, line 1", header, "a column")
    return header, np.array(lines, int)


def _from_npz(name: str, path: Path, label: str | None) -> Table:
    allowed = "an NPZ file with arrays X and y, without pickled objects"
    try:
        with np.load(path, allow_pickle=False) as found:
            arrays = {key: found[key] for key in ("X", "y") if key in found}
    except (OSError, ValueError, KeyError) as error:
        raise InvalidInput(str(path), str(error).strip().replace("\n", " "), allowed) from None
    if "X" not in arrays or ("y" not in arrays and label is not None):
        raise InvalidInput(str(path), f"arrays {sorted(arrays)}", allowed)
    return _from_arrays(name, path.name, arrays["X"], arrays.get("y"), label)


def _from_arrays(name: str, source: str, inputs: Any, labels: Any, label: str | None) -> Table:
    if hasattr(inputs, "columns") and hasattr(inputs, "__getitem__"):
        columns = dict(_from_frame(name, inputs).columns)
        inputs = np.empty((len(next(iter(columns.values()), ())), 0))
    else:
        inputs = inputs if np.ma.isMaskedArray(inputs) else np.asarray(inputs)
        if inputs.ndim != 2:
            raise InvalidInput(f"{source}, X", f"shape {inputs.shape}", "a matrix with one row per record")
        columns = {f"x{number}": _column(inputs[:, number]) for number in range(inputs.shape[1])}
    if labels is not None:
        labels = labels if np.ma.isMaskedArray(labels) else np.asarray(labels)
        if labels.shape != inputs.shape[:1]:
            raise InvalidInput(f"{source}, y", f"shape {labels.shape}", f"one label per row of X, {inputs.shape[0]}")
        columns[label or "y"] = _column(labels)
    return _table(name, source, columns, 0)


def _from_frame(name: str, frame: Any) -> Table:
    _refuse_repeats(name, [str(each) for each in frame.columns], "a column")
    columns = {}
    for each in frame.columns:
        values = np.asarray(frame[each])
        if values.dtype.kind in "mM":
            raise InvalidInput(f"{name}, column {str(each)!r}", "dates or times", "numbers, such as days or years")
        columns[str(each)] = _column(values)
    return _table(name, name, columns, 0)


def _table(name: str, source: str, columns: Mapping[str, Values], first: int, rows: Any = None) -> Table:
    lengths = {len(own) for own in columns.values()}
    if len(lengths) > 1:
        raise InvalidInput(source, f"columns of {min(lengths)} to {max(lengths)} values", "columns of one length")
    count = lengths.pop() if lengths else 0
    if not count:
        raise InvalidInput(source, "no rows", "at least one row below the header")
    return Table(name, source, columns, first + (np.arange(count) if rows is None else rows))


def _column(values: Any) -> Values:
    """Return numbers as floats, anything else as objects with None where a value is missing."""
    array = np.asarray(values)
    if np.ma.isMaskedArray(values):
        array = array.astype(np.float64 if array.dtype.kind in "fiub" else object)  # a copy
        array[np.ma.getmaskarray(values)] = np.nan
    if array.dtype.kind in "fb" or (array.dtype.kind in "iu" and np.all(np.abs(array.astype(float)) < EXACT)):
        return array.astype(np.float64)
    array = array.astype(object)
    # Missing values of pandas and NumPy are not equal to themselves, or cannot be compared.
    return np.array([None if _is_missing(each) else each for each in array] or [None], object)[: len(array)]


def _is_missing(value: Any) -> bool:
    if value is None or (isinstance(value, str) and value.strip().lower() in ("", "nan", "+nan", "-nan")):
        return True
    try:
        return bool(value != value)
    except TypeError:
        return True


def as_text(values: Values | Iterable[Any]) -> list[str | None]:
    """Return values as text: "1" for 1.0, "01" unchanged, None where a value is missing."""
    return [_text(each) for each in values]


def tidy(name: str) -> str:
    """Return a name or text without surrounding spaces, and with accents in their composed form (Unicode NFC)."""
    return unicodedata.normalize("NFC", name.strip())


def _text(value: Any) -> str | None:
    if value is None or (isinstance(value, float) and value != value):
        return None
    if isinstance(value, str):
        value = tidy(value)
        if not PLAIN.fullmatch(value):
            return value
    number = as_number(value)
    if number is None or not abs(number) < EXACT:
        return str(value)
    return str(int(number)) if number == int(number) else repr(number)


def as_number(value: Any) -> float | None:
    """Return the number of a numeric value or text; None for other text."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return None
