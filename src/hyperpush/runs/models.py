"""Read and write files of models: one file per set, with arrays by their path in the pytree and clients on axis 0."""

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

BY_EXAMPLE = ("hypers", "value")  # sets that may hold one row per example; clients may differ in their examples' number
ALL = "all"  # name of the file with the models of all clients


def leaf_name(path: tuple[Any, ...]) -> str:
    """Return the name under which files hold the leaf of a pytree at this path, such as `layers/0/weight`."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def save_models(
    folder: Path,
    stacked: PyTree,
    first: bool = True,
    names: Sequence[str] | None = None,
    counts: Mapping[str, Sequence[int]] | None = None,
) -> None:
    """Write the arrays of a pytree with clients on axis 0 into a folder, keyed by path.

    One file holds all clients. If `names` holds a single owner, such as a peer, the file is named after this owner and
    its arrays lack the client axis. If arrays are spread over processes, each process writes a file with the rows of
    its clients. Otherwise the process with `first` writes. `counts` maps the name of a leaf to the number of entries to
    keep for each client; further entries are padding and become 0.
    """
    found = jax.tree_util.tree_flatten_with_path(eqx.filter(stacked, eqx.is_array))[0]
    named = [(leaf_name(path), leaf) for path, leaf in found]
    clients = {leaf.shape[:1] for _, leaf in named}
    if len(dict(named)) < len(named) or len(clients) != 1 or clients == {()}:
        given = {key: leaf.shape for key, leaf in named}
        raise InvalidInput(
            f"models.{folder.name}", given, "arrays of different names with the same first axis, clients"
        )
    spread = next((leaf for _, leaf in named if processes.spread(leaf)), None)
    if not first and spread is None:
        return
    folder.mkdir(parents=True, exist_ok=True)  # the folder exists if a party was killed and writes a second time
    if spread is not None:
        own = sorted(number for number, _ in processes.own_clients(spread))
        file, rows = f"clients-{own[0]:09d}", {key: _rows(leaf, own) for key, leaf in named}
    else:
        rows = {key: _without_padding(np.asarray(leaf), (counts or {}).get(key)) for key, leaf in named}
        file = ALL
        if names is not None and len(names) == 1:
            file, rows = owner_file(names[0]), {key: each[0] for key, each in rows.items()}
    # The copy turns scalars into arrays, and makes arrays contiguous, which the file format requires.
    save_file({key: np.array(each, order="C") for key, each in rows.items()}, folder / f"{file}.safetensors")


def _rows(leaf: Any, clients: Sequence[int]) -> np.ndarray:
    """Return the rows of these clients, which this process must hold."""
    if not processes.spread(leaf):
        return np.asarray(leaf)[list(clients)]
    rows = dict(processes.own_clients(leaf))
    return np.stack([rows[client] for client in clients])


def _without_padding(rows: np.ndarray, counts: Sequence[int] | None) -> np.ndarray:
    """Return the rows with zeros after the first `counts[i]` entries of client i; `counts=None` keeps all entries."""
    if counts is None:
        return rows
    real = np.arange(rows.shape[1]) < np.asarray(counts)[:, None]
    return np.where(real.reshape(*real.shape, *(1,) * (rows.ndim - 2)), rows, np.zeros((), rows.dtype))


def owner_file(name: str) -> str:
    """Return the name of the file with an owner's model, without its extension.

    Characters that could change the path are percent-encoded (%XX).
    """
    return quote(name, safe=" +,=@~()").replace(".", "%2E")


def load_models(folder: Path, names: Sequence[str] | None = None) -> dict[str, np.ndarray]:
    """Return a saved set of models as arrays by path, with owners on axis 0.

    `names` are the owners' names; None if the run did not record them.
    """
    if names is not None and len(names) == 1:
        return {key: each[None] for key, each in load_arrays(folder / f"{owner_file(names[0])}.safetensors").items()}
    parts = [load_arrays(file) for file in sorted(folder.iterdir())]
    if not parts or any(set(part) != set(parts[0]) for part in parts):
        raise InvalidInput("models", str(folder), "one readable file for all clients, or one for each process")
    joined = {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
    clients = {len(each) for each in joined.values()} | ({len(names)} if names is not None else set())
    if len(clients) > 1:
        raise InvalidInput("models", str(folder), "files of one run, whose arrays have a row for each client")
    return joined


def load_arrays(file: Path) -> dict[str, np.ndarray]:
    try:
        return load_file(file)
    except (OSError, SafetensorError) as error:
        raise InvalidInput("run", str(file), f"a readable file ({error})") from None
