"""Files of models: one for each client, arrays by their path in the pytree."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import equinox as eqx
import jax
import numpy as np
from jaxtyping import PyTree
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from hyperpush.base import processes
from hyperpush.base.errors import InvalidInput

BY_EXAMPLE = ("hypers", "value")  # sets that may have a number per example: their lengths may differ by client


def leaf_name(path: tuple[Any, ...]) -> str:
    """Return the name of a leaf of a pytree in files."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def save_models(
    folder: Path,
    stacked: PyTree,
    first: bool = True,
    names: Sequence[str] | None = None,
    counts: Mapping[str, Sequence[int]] | None = None,
) -> None:
    """Write the arrays of a pytree whose leaves have the client axis first: one file for each client, keyed by path.

    Files are called after `names`, or `client-0`, …. If arrays are spread over processes, each process writes the rows
    of its clients; otherwise the process with `first` writes all. `counts` holds the rows to keep of a leaf by client.
    """
    counts = counts or {}
    found = jax.tree_util.tree_flatten_with_path(eqx.filter(stacked, eqx.is_array))[0]
    named = [(leaf_name(path), leaf) for path, leaf in found]
    clients = {leaf.shape[:1] for _, leaf in named}
    if len(dict(named)) < len(named) or len(clients) != 1 or clients == {()}:
        given = {key: leaf.shape for key, leaf in named}
        raise InvalidInput(
            f"models.{folder.name}", given, "arrays of different names with the same first axis, clients"
        )
    spread = any(processes.spread(leaf) for _, leaf in named)
    if not (first or spread):
        return
    folder.mkdir(parents=True, exist_ok=True)  # it exists if a killed party writes again
    rows: dict[int, dict[str, np.ndarray]] = {}
    for key, leaf in named:
        each = processes.own_clients(leaf) if processes.spread(leaf) else enumerate(np.asarray(leaf))
        for client, row in each:
            rows.setdefault(client, {})[key] = row[: counts[key][client]] if key in counts else row
    for client, own in rows.items():
        if len(own) == len(named):  # a client of this process: unspread arrays give rows of other clients, too
            # The copy makes rows contiguous, as the format needs, and scalars arrays.
            name = f"client-{client}" if names is None else names[client]
            save_file({k: np.array(v, order="C") for k, v in own.items()}, folder / owner_file(name))


def owner_file(name: str) -> str:
    """Return the file name of an owner's model; characters that could change a path are written as %XX."""
    return f"{quote(name, safe=' +,=@~()').replace('.', '%2E')}.safetensors"


def load_models(folder: Path, names: Sequence[str] | None = None) -> dict[str, np.ndarray]:
    """Load a set of models as arrays by path, owners on axis 0, in the order of `names`, numbers or files."""
    found = sorted(folder.iterdir())
    if names is None:
        numbered = [folder / f"client-{number}.safetensors" for number in range(len(found))]
        files = numbered if set(found) == set(numbered) else found
    else:
        files = [folder / owner_file(name) for name in names]
    owners = [load_arrays(file) for file in files]
    if not owners or any(set(own) != set(owners[0]) for own in owners):
        raise InvalidInput("models", str(folder), "one readable file for each client, with the same arrays")
    by_example = folder.name in BY_EXAMPLE
    return {key: _stack(folder, [own[key] for own in owners], by_example) for key in owners[0]}


def _stack(folder: Path, rows: list[np.ndarray], by_example: bool) -> np.ndarray:
    """Stack owners on axis 0; shorter hypers per example are padded with zeros at the end, as in tasks."""
    same = {row.shape[1:] if by_example and row.ndim else row.shape for row in rows}
    if len(same) > 1:
        raise InvalidInput("models", str(folder), "files of one run, whose arrays have the same shapes")
    if by_example and rows[0].ndim:
        most = max(map(len, rows))
        rows = [np.pad(row, [(0, most - len(row)), *[(0, 0)] * (row.ndim - 1)]) for row in rows]
    return np.stack(rows)


def load_arrays(file: Path) -> dict[str, np.ndarray]:
    try:
        return load_file(file)
    except (OSError, SafetensorError) as error:
        raise InvalidInput("run", str(file), f"one readable file for each client ({error})") from None
