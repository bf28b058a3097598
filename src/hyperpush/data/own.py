"""Your own data: a folder with a file for each client, or one table with a column that says whose a row is."""

import csv
import zipfile
from pathlib import Path

import numpy as np

from hyperpush.data.sources import Dataset
from hyperpush.errors import InvalidInput


def from_folder(folder: str | Path, *, classes: int | None = None) -> Dataset:
    """A `.npz` for each client, named after it, with arrays `inputs` [m, …] and `labels` [m], whole numbers from 0."""
    folder = Path(folder)
    paths = sorted(folder.glob("*.npz")) if folder.is_dir() else []
    if not paths:
        raise InvalidInput("folder", str(folder), "a folder with a .npz file for each client")
    read = [_client(path) for path in paths]
    shape = read[0][0].shape[1:]
    for path, (inputs, _) in zip(paths, read, strict=True):
        if inputs.shape[1:] != shape:
            raise InvalidInput(str(path), f"inputs {inputs.shape[1:]}", f"inputs {shape}, as in {paths[0].name}")
    owners = np.repeat(np.arange(len(read)), [len(labels) for _, labels in read])
    inputs, labels = (np.concatenate([each[place] for each in read]) for place in (0, 1))
    return _dataset(folder, inputs, labels, classes, owners, [path.stem for path in paths])


def from_csv(path: str | Path, *, client: str = "client", label: str = "label", classes: int | None = None) -> Dataset:
    """A table with a header: `client` says whose a row is, `label` is a whole number from 0, the rest are inputs."""
    path = Path(path)
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            header, *lines = [row for row in csv.reader(file, strict=True) if row] or [[]]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InvalidInput(
            "path", str(path), f"a CSV file in UTF-8 ({getattr(error, 'strerror', None) or error})"
        ) from None
    for name, given in (("client", client), ("label", label)):
        if header.count(given) != 1:
            raise InvalidInput(name, given, f"one of the columns {', '.join(header) or '(there are none)'}")
    columns = [place for place, name in enumerate(header) if name not in (client, label)]
    if not lines or not columns:
        raise InvalidInput("path", str(path), "at least one row, and one column of inputs")
    numbers = np.empty((len(lines), len(columns)), np.float32)
    for place, row in enumerate(lines):
        if len(row) != len(header):
            raise InvalidInput(f"{path}, row {place + 2}", f"{len(row)} entries", f"{len(header)}, one per column")
        try:
            numbers[place] = [float(row[column]) for column in columns]
        except ValueError as error:
            raise InvalidInput(f"{path}, row {place + 2}", str(error), "numbers") from None
    try:
        labels = np.array([int(row[header.index(label)]) for row in lines], np.int64)
    except ValueError as error:
        raise InvalidInput(f"{path}, column {label}", str(error), "whole numbers from 0") from None
    names, owners = np.unique([row[header.index(client)] for row in lines], return_inverse=True)
    return _dataset(path, numbers, labels, classes, owners.astype(np.int64), names.tolist())


def _client(path: Path) -> tuple[np.ndarray, np.ndarray]:
    try:
        with np.load(path, allow_pickle=False) as found:
            missing = {"inputs", "labels"} - set(found.files)
            if missing:
                raise InvalidInput(str(path), sorted(found.files), "arrays inputs and labels")
            inputs, labels = found["inputs"], found["labels"]
    except (OSError, EOFError, ValueError, zipfile.BadZipFile) as error:
        if isinstance(error, InvalidInput):
            raise
        raise InvalidInput(str(path), "a file that cannot be read", f"a .npz file without objects ({error})") from None
    if not np.issubdtype(labels.dtype, np.integer) or labels.ndim != 1:
        raise InvalidInput(str(path), f"labels {labels.dtype} {labels.shape}", "one whole number per example")
    if inputs.ndim < 2 or len(inputs) != len(labels) or not len(labels):
        given = f"inputs {inputs.shape}, labels {labels.shape}"
        raise InvalidInput(str(path), given, "inputs [m, …] and labels [m], m at least 1")
    if not (np.issubdtype(inputs.dtype, np.number) and not np.issubdtype(inputs.dtype, np.complexfloating)):
        raise InvalidInput(str(path), f"inputs {inputs.dtype}", "real numbers")
    return inputs.astype(np.float32), labels.astype(np.int64)


def _dataset(
    path: Path, inputs: np.ndarray, labels: np.ndarray, classes: int | None, owners: np.ndarray, names: list[str]
) -> Dataset:
    if not np.all(np.isfinite(inputs)):
        client = names[owners[np.argwhere(~np.isfinite(inputs))[0][0]]]
        raise InvalidInput(str(path), f"a number that is not finite, of client {client}", "finite numbers")
    most = int(labels.max()) + 1 if classes is None else classes
    if not 0 <= labels.min() <= labels.max() < most:
        wrong = labels[(labels < 0) | (labels >= most)][0]
        raise InvalidInput(str(path), f"a label {wrong}", f"labels from 0 to {most - 1}")
    note = f"{path.name}: {len(labels):,} examples of {len(names)} clients"
    return Dataset(path.stem, inputs, labels, most, note, None, owners, tuple(names))
