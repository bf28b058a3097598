"""Files of models: one for each set, clients on axis 0, arrays by their path in the pytree."""

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

BY_EXAMPLE = ("hypers", "value")  # sets that may have a number per example, of which clients may have different numbers
ALL = "all"  # the file of all clients


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
    """Write the arrays of a pytree whose leaves have the client axis first, keyed by path.

    One file holds all clients. The model of a single owner in `names`, such as a peer, is a file called after it,
    without the client axis. If arrays are spread over processes, each process writes a file with the rows of its
    clients; otherwise the process with `first` writes. `counts` holds the rows that are kept of a leaf by client; the
    others become 0.
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
    folder.mkdir(parents=True, exist_ok=True)  # it exists if a killed party writes again
    if spread is not None:
        own = sorted(number for number, _ in processes.own_clients(spread))
        file, rows = f"clients-{own[0]:09d}", {key: _rows(leaf, own) for key, leaf in named}
    else:
        rows = {key: _without_padding(np.asarray(leaf), (counts or {}).get(key)) for key, leaf in named}
        file = ALL
        if names is not None and len(names) == 1:
            file, rows = owner_file(names[0]), {key: each[0] for key, each in rows.items()}
    # The copy makes arrays contiguous, as the format needs, and scalars arrays.
    save_file({key: np.array(each, order="C") for key, each in rows.items()}, folder / f"{file}.safetensors")


def _rows(leaf: Any, clients: Sequence[int]) -> np.ndarray:
    """Return the rows of some clients, which this process sees."""
    if not processes.spread(leaf):
        return np.asarray(leaf)[list(clients)]
    rows = dict(processes.own_clients(leaf))
    return np.stack([rows[client] for client in clients])


def _without_padding(rows: np.ndarray, counts: Sequence[int] | None) -> np.ndarray:
    """Return one row per client, with 0 behind the first `counts` numbers of each; None keeps all."""
    if counts is None:
        return rows
    real = np.arange(rows.shape[1]) < np.asarray(counts)[:, None]
    return np.where(real.reshape(*real.shape, *(1,) * (rows.ndim - 2)), rows, np.zeros((), rows.dtype))


def owner_file(name: str) -> str:
    """Return the file name of an owner's model, without its end; characters that could change a path become %XX."""
    return quote(name, safe=" +,=@~()").replace(".", "%2E")


def load_models(folder: Path, names: Sequence[str] | None = None) -> dict[str, np.ndarray]:
    """Load a set of models as arrays by path, owners on axis 0; `names` are the owners, None if they lack names."""
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
