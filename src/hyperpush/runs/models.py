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

BY_EXAMPLE = ("hypers", "value")  # which may have a number for each example, of which clients own different numbers


def leaf_name(path: tuple[Any, ...]) -> str:
    """What files call a leaf of a pytree."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def save_models(
    folder: Path,
    stacked: PyTree,
    first: bool = True,
    names: Sequence[str] | None = None,
    counts: Mapping[str, Sequence[int]] | None = None,
) -> None:
    """Write the arrays of a pytree whose leaves have the client axis first: one file for each client, keyed by path.

    Files are called after `names`, or `client-0`, …. Of arrays that are spread over processes each writes its own
    clients' rows; of others the `first` writes all. Of arrays in `counts`, a client's file has so many numbers.
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
    folder.mkdir(parents=True, exist_ok=True)  # a party that was killed meanwhile writes again
    rows: dict[int, dict[str, np.ndarray]] = {}
    for key, leaf in named:
        each = processes.own_clients(leaf) if processes.spread(leaf) else enumerate(np.asarray(leaf))
        for client, row in each:
            rows.setdefault(client, {})[key] = row[: counts[key][client]] if key in counts else row
    for client, own in rows.items():
        if len(own) == len(named):  # of arrays that all hold, a process writes the rows of its own clients only
            # The copy makes rows contiguous, as the format needs; an array also where a client has a scalar.
            name = f"client-{client}" if names is None else names[client]
            save_file({k: np.array(v, order="C") for k, v in own.items()}, folder / owner_file(name))


def owner_file(name: str) -> str:
    """The file of an owner's model; whatever a file system could take for a path is written as %XX."""
    return f"{quote(name, safe=' +,=@~()').replace('.', '%2E')}.safetensors"


def load_models(folder: Path, names: Sequence[str] | None = None) -> dict[str, np.ndarray]:
    """A set of models as arrays by path, owners on axis 0, by `names`, by number or by file."""
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
    """Owners on axis 0; of hypers, zeros behind those who have fewer numbers than others, as tasks have them."""
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
