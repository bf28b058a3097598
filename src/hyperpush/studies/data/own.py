"""Your own data: a folder with a file for each client, or one table with a column that says whose a row is."""

import csv
from collections import Counter
from pathlib import Path

import numpy as np

from hyperpush.checks import check_integer
from hyperpush.errors import InvalidInput
from hyperpush.studies.data.sources import Dataset

# Models and tables have a place for every class up to the largest label, so an identifier taken for a label would fill
# the memory. ImageNet-21k has 21,841 classes.
CLASSES = 100_000  # at most, if their number is not given
_FINITE = "finite numbers, at most 3.4e38 in size (float32)"


def from_folder(folder: str | Path, *, classes: int | None = None) -> Dataset:
    """A `.npz` for each client, named after it, with arrays `inputs` [m, …] and `labels` [m], whole numbers from 0.

    Args:
        folder: Where the files are; other files in it are left alone.
        classes: How many classes there are, at least 1; None takes the largest label, which is below `CLASSES` then.

    Raises:
        InvalidInput: A file cannot be used; the message names it and what is wrong.
    """
    folder = Path(folder)
    paths = sorted(folder.glob("*.npz")) if folder.is_dir() else []
    if not paths:
        raise InvalidInput("folder", str(folder), "a folder with a .npz file for each client")
    most, allowed = _limit(classes)
    read = [_client(path, most, allowed) for path in paths]
    shape = read[0][0].shape[1:]
    for path, (inputs, _) in zip(paths, read, strict=True):
        if inputs.shape[1:] != shape:
            raise InvalidInput(str(path), f"inputs {inputs.shape[1:]}", f"inputs {shape}, as in {paths[0].name}")
    owners = np.repeat(np.arange(len(read)), [len(labels) for _, labels in read])
    inputs, labels = (np.concatenate([each[place] for each in read]) for place in (0, 1))
    return _dataset(folder, inputs, labels, classes, owners, [path.stem for path in paths])


def from_csv(path: str | Path, *, client: str = "client", label: str = "label", classes: int | None = None) -> Dataset:
    """A table with a header: `client` says whose a row is, `label` is a whole number from 0, the rest are inputs.

    Args:
        path: A CSV file in UTF-8.
        client: The column with the owners' names.
        label: The column with the labels.
        classes: How many classes there are, at least 1; None takes the largest label, which is below `CLASSES` then.

    Raises:
        InvalidInput: A row cannot be used; the message names it, its column and what is wrong.
    """
    path = Path(path)
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file, strict=True)
            (_, header), *lines = [(reader.line_num, row) for row in reader if row] or [(0, [])]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InvalidInput(
            "path", str(path), f"a CSV file in UTF-8 ({getattr(error, 'strerror', None) or error})"
        ) from None
    _check_header(path, header, client, label)
    columns = [place for place, name in enumerate(header) if name not in (client, label)]
    if not lines or not columns:
        raise InvalidInput("path", str(path), "at least one row, and one column of inputs")
    whose, answer = header.index(client), header.index(label)
    most, allowed = _limit(classes)
    numbers, labels = np.empty((len(lines), len(columns)), np.float32), np.empty(len(lines), np.int64)
    for place, (number, row) in enumerate(lines):
        where = f"{path}, row {number}"
        if len(row) != len(header):
            raise InvalidInput(where, f"{len(row)} entries", f"{len(header)}, one per column")
        if not row[whose].strip():
            raise InvalidInput(f"{where}, column {client}", row[whose], "the name of a client")
        with np.errstate(over="ignore"):  # what is too large becomes infinite
            numbers[place] = [_number(f"{where}, column {header[column]}", row[column]) for column in columns]
        if not np.all(np.isfinite(numbers[place])):
            wrong = columns[int(np.argmin(np.isfinite(numbers[place])))]
            raise InvalidInput(f"{where}, column {header[wrong]}", f"{row[wrong]} of client {row[whose]}", _FINITE)
        labels[place] = _label(f"{where}, column {label}", row[answer], most, allowed)
    names, owners = np.unique([row[whose] for _, row in lines], return_inverse=True)
    return _dataset(path, numbers, labels, classes, owners.astype(np.int64), names.tolist())


def _check_header(path: Path, header: list[str], client: str, label: str) -> None:
    for name, given in (("client", client), ("label", label)):
        if header.count(given) != 1:
            raise InvalidInput(name, given, f"one of the columns {', '.join(header) or '(there are none)'}")
    if client == label:
        raise InvalidInput("label", label, "another column than that of the clients")
    name, times = Counter(header).most_common(1)[0]
    if times > 1:
        allowed = "a name of its own for each column"
        raise InvalidInput(f"{path}, column {name}", f"{times} columns of this name", allowed)


def _limit(classes: int | None) -> tuple[int, str]:
    """What labels are below, and the words for it; at most 2³¹, as JAX keeps labels in 32 bits by default."""
    if classes is None:
        return CLASSES, f"labels, whole numbers from 0 to {CLASSES - 1} unless classes is given"
    return check_integer("classes", classes, 1, 2**31), f"labels, whole numbers from 0 to {classes - 1}"


def _label(where: str, given: str, most: int, allowed: str) -> int:
    try:
        number = int(given)
    except ValueError:
        number = -1
    if not 0 <= number < most:
        raise InvalidInput(where, given, allowed)
    return number


def _number(where: str, given: str) -> float:
    try:
        return float(given)
    except ValueError:
        raise InvalidInput(where, given, "a number") from None


def _client(path: Path, most: int, allowed: str) -> tuple[np.ndarray, np.ndarray]:
    try:
        with path.open("rb") as file, np.errstate(all="ignore"), np.load(file, allow_pickle=False) as found:
            names = sorted(found.files)
            inputs, labels = (np.asarray(found[name]) if name in names else None for name in ("inputs", "labels"))
    except Exception as error:  # a damaged file brings out whatever numpy, zipfile and zlib stumble over
        reason = " ".join(str(error).split())  # in one line
        raise InvalidInput(str(path), "a file that cannot be read", f"a .npz file without objects ({reason})") from None
    if inputs is None or labels is None:
        raise InvalidInput(str(path), names, "arrays inputs and labels")
    if labels.dtype.kind not in "iu" or labels.ndim != 1:
        raise InvalidInput(str(path), f"labels {labels.dtype} {labels.shape}", "one whole number per example")
    if inputs.ndim < 2 or len(inputs) != len(labels) or not len(labels):
        given = f"inputs {inputs.shape}, labels {labels.shape}"
        raise InvalidInput(str(path), given, "inputs [m, …] and labels [m], m at least 1")
    if inputs.dtype.kind not in "iuf":
        raise InvalidInput(str(path), f"inputs {inputs.dtype}", "real numbers")
    for label in (int(labels.min()), int(labels.max())):
        if not 0 <= label < most:
            raise InvalidInput(str(path), f"a label {label}", allowed)
    with np.errstate(over="ignore"):  # what is too large becomes infinite
        numbers = inputs.astype(np.float32)
    if not np.all(np.isfinite(numbers)):
        wrong = inputs[~np.isfinite(numbers)][0]
        raise InvalidInput(str(path), f"inputs with {wrong}, of client {path.stem}", _FINITE)
    return numbers, labels.astype(np.int64)


def _dataset(
    path: Path, inputs: np.ndarray, labels: np.ndarray, classes: int | None, owners: np.ndarray, names: list[str]
) -> Dataset:
    note = f"{path.name}: {len(labels):,} examples of {len(names)} clients"
    most = int(labels.max()) + 1 if classes is None else classes
    return Dataset(path.stem, inputs, labels, most, note, None, owners, tuple(names))
