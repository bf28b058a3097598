"""What a run folder holds, and reading it back.

`config.toml`, `metrics.jsonl` (one record a line), `result.json`, `figures/*.png`, and for each set of models
`models/<name>/client-<i>.safetensors`.
"""

import json
import math
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from hyperpush.errors import InvalidInput, unknown

CONFIG, METRICS, RESULT, MODELS, FIGURES = "config.toml", "metrics.jsonl", "result.json", "models", "figures"


@dataclass(frozen=True)
class SavedRun:
    """A finished run: its configuration, its result, its records, and its models when asked for."""

    path: Path
    config: dict[str, Any]
    result: dict[str, Any]
    metrics: list[dict[str, Any]]

    @property
    def params(self) -> dict[str, Any]:
        """Every saved set of models, by name."""
        folder = self.path / MODELS
        names = sorted(each.name for each in folder.iterdir()) if folder.is_dir() else []
        return {name: _load_models(folder / name) for name in names}

    def models(self, name: str) -> Any:
        """One saved set of models: nested dicts by path, whose arrays have the client axis first."""
        folder = self.path / MODELS
        if not (folder / name).is_dir():
            raise unknown("models", name, (each.name for each in folder.glob("*")))
        return _load_models(folder / name)


def load(run: str | Path) -> SavedRun:
    """Read a run folder."""
    path = Path(run)
    return SavedRun(
        path,
        _parse(path, CONFIG, tomllib.loads),
        _parse(path, RESULT, json.loads),
        _parse(path, METRICS, lambda text: [json.loads(line) for line in text.splitlines()]),
    )


def _parse(path: Path, name: str, parse: Callable[[str], Any]) -> Any:
    try:
        return parse((path / name).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidInput("run", str(path), f"the folder of a finished run ({name}: {error})") from None


def to_json(value: Any) -> str:
    """JSON that every reader accepts: arrays become lists, and NaN or infinity is refused by name."""
    return json.dumps(_plain(value, ""), allow_nan=False)


def _plain(value: Any, where: str) -> Any:
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, dict):
        return {str(key): _plain(each, f"{where}.{key}" if where else str(key)) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each, f"{where}[{place}]") for place, each in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        raise InvalidInput(where, value, "a finite number or null")
    return str(value) if isinstance(value, Path) else value


def save_models(folder: Path, stacked: Any, first: bool = True, names: Sequence[str] | None = None) -> None:
    """Write the arrays of a pytree whose leaves have the client axis first: one file for each client, keyed by path.

    Files are called after `names`, or `client-0`, …. Of arrays that are spread over processes each writes its own
    clients' rows; of others the `first` writes all.
    """
    import equinox as eqx
    import jax

    from hyperpush import processes

    found = jax.tree_util.tree_flatten_with_path(eqx.filter(stacked, eqx.is_array))[0]
    named = [(jax.tree_util.keystr(path, simple=True, separator="/"), leaf) for path, leaf in found]
    clients = {leaf.shape[:1] for _, leaf in named}
    if len(dict(named)) < len(named) or len(clients) != 1 or clients == {()}:
        given = {key: leaf.shape for key, leaf in named}
        raise InvalidInput(
            f"models.{folder.name}", given, "arrays of different names with the same first axis, clients"
        )
    spread = any(processes.spread(leaf) for _, leaf in named)
    if not (first or spread):
        return
    folder.mkdir(parents=True, exist_ok=spread)
    rows: dict[int, dict[str, np.ndarray]] = {}
    for key, leaf in named:
        each = processes.own_clients(leaf) if processes.spread(leaf) else enumerate(np.asarray(leaf))
        for client, row in each:
            rows.setdefault(client, {})[key] = row
    for client, own in rows.items():
        if len(own) == len(named):  # of arrays that all hold, a process writes the rows of its own clients only
            # The copy makes rows contiguous, as the format needs; an array also where a client has a scalar.
            name = f"client-{client}" if names is None else names[client]
            save_file({k: np.array(v, order="C") for k, v in own.items()}, folder / owner_file(name))


def owner_file(name: str) -> str:
    """The file of an owner's model; whatever a file system could take for a path is written as %XX."""
    return f"{quote(name, safe=' +,=@~()').replace('.', '%2E')}.safetensors"


def _load_models(folder: Path) -> Any:
    try:
        found = list(folder.iterdir())
        numbered = [folder / f"client-{number}.safetensors" for number in range(len(found))]
        files = [load_file(path) for path in (numbered if set(found) == set(numbered) else sorted(found))]
        arrays = {key: np.stack([file[key] for file in files]) for key in files[0]}
    except (OSError, SafetensorError, KeyError, IndexError, ValueError) as error:
        raise InvalidInput("models", str(folder), f"one readable file for each client ({error})") from None
    if set(arrays) == {""}:
        return arrays[""]
    tree: dict[str, Any] = {}
    for key, array in arrays.items():
        *parents, name = key.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = array
    return tree
