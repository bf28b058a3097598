"""Read and write checkpoints on disk; incomplete and damaged checkpoints are not used.

Each process writes the rows of its clients into one file, for example process 0 of 2:

    000012-state-0of2.<BLAKE2b digest of the file>.safetensors

The header of the file describes its arrays. A file gets its name after all of its bytes are on disk. A checkpoint is
complete when the files of all processes exist.
"""

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import file_digest
from pathlib import Path
from typing import Any, Literal, NamedTuple, final

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from hyperpush.base import processes
from hyperpush.base.files import sync, unwritten
from hyperpush.engines.keys import as_bits

Kind = Literal["result", "state"]
_NAME = re.compile(r"((\d{6})-(result|state))-(\d+)of(\d+)\.([0-9a-f]+)\.safetensors")


class ClientRows(NamedTuple):
    """An array to save. Along the client axis `axis`, only the first `clients` rows are saved; the others are padding.

    If `axis` is None, the array lacks a client axis and is saved whole.
    """

    array: Any
    axis: int | None = None
    clients: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        shape = self.array.shape
        return shape if self.axis is None else (*shape[: self.axis], self.clients, *shape[self.axis + 1 :])


@dataclass(frozen=True)
class Stored:
    """An array in a checkpoint, of which each process reads the rows that it needs."""

    name: str
    shape: tuple[int, ...]
    dtype: Any
    axis: int | None
    blocks: dict[int, Path] = field(default_factory=dict)  # by first row of a block of rows, the file that holds it

    def read(self, first: int = 0, end: int | None = None) -> np.ndarray:
        """Return the rows of clients `first` to `end` − 1; `end=None` reads to the last client."""
        if 0 in self.shape:
            return np.zeros(self.shape, self.dtype)
        parts = []
        for start, file in sorted(self.blocks.items()):
            with safe_open(file, framework="np") as data:
                if self.axis is None:
                    return data.get_tensor(f"{self.name}@0")
                block = data.get_slice(f"{self.name}@{start}")
                size = block.get_shape()[self.axis]
                low, high = max(first - start, 0), size if end is None else min(end - start, size)
                if low < high:
                    parts.append(block[(slice(None),) * self.axis + (slice(low, high),)])
        return np.concatenate(parts, axis=self.axis or 0)


class Saved(NamedTuple):
    """A checkpoint on disk: its number, its kind, the files of all processes, and the facts in their headers."""

    number: int
    kind: Kind
    files: tuple[Path, ...]
    facts: dict[str, Any]

    def load(self) -> dict[str, Stored]:
        """Return the arrays of the checkpoint by name; random keys come as integers."""
        found = {
            name: Stored(name, tuple(shape), jnp.dtype(dtype), axis)
            for name, (shape, dtype, axis) in self.facts["arrays"].items()
        }
        for file in self.files:
            with safe_open(file, framework="np") as data:
                for key in data.keys():  # noqa: SIM118
                    name, _, start = key.rpartition("@")
                    found[name].blocks[int(start)] = file
        return found

    def remove(self) -> None:
        """Delete the files of the checkpoint."""
        for file in self.files if processes.first_process() else ():
            file.unlink(missing_ok=True)


@final
class CheckpointFolder:
    """Folder that checkpoints are written to and read from; `warn` is called with a text for a damaged checkpoint."""

    def __init__(self, folder: Path, warn: Callable[[str], None]):
        self.folder = folder
        self.warn = warn
        self._next = 0

    def save(self, kind: Kind, arrays: Mapping[str, ClientRows], facts: dict[str, Any]) -> Saved:
        """Write a checkpoint and return it; a failure leaves all other checkpoints unchanged."""
        number, self._next = self._next, self._next + 1
        bits = {name: rows._replace(array=as_bits(rows.array)) for name, rows in arrays.items()}
        listed = {name: (rows.shape, str(rows.array.dtype), rows.axis) for name, rows in bits.items()}
        stem = f"{number:06d}-{kind}-{jax.process_index()}of{processes.count()}"
        new = self.folder / f".{stem}.new"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            _write(new, bits, {"facts": json.dumps({**facts, "arrays": listed})})
            new.rename(self.folder / f"{stem}.{_digest(new)}.safetensors")
            sync(self.folder)
        except (OSError, SafetensorError) as error:
            new.unlink(missing_ok=True)
            raise unwritten(f"checkpoint {number}", error, any(self.folder.glob("[0-9]*"))) from error
        processes.barrier(f"checkpoint {number}")
        files = tuple(sorted(self.folder.glob(f"{number:06d}-{kind}-*")))
        return Saved(number, kind, files, {**facts, "arrays": listed})

    def find(self) -> list[Saved]:
        """Return the intact checkpoints, newest first; delete incomplete checkpoints, and rename damaged ones."""
        parts: dict[str, list[re.Match[str]]] = {}
        for file in sorted(self.folder.glob("*")):
            if match := _NAME.fullmatch(file.name):
                parts.setdefault(match[1], []).append(match)
            elif file.name.startswith(".") and processes.first_process():
                file.unlink()
        found = []
        for name, matches in sorted(parts.items(), reverse=True):
            number, kind = int(name[:6]), "result" if name.endswith("result") else "state"
            self._next = max(self._next, number + 1)
            files = tuple(self.folder / match.string for match in matches)
            wrong = [match.string for match in matches if _digest(self.folder / match.string) != match[6]]
            whole = len(matches) == int(matches[0][5])
            if processes.agree(False, bool(wrong))[1]:
                self._reject(name, files, wrong)
            elif whole:
                with safe_open(files[0], framework="np") as data:
                    found.append(Saved(number, kind, files, json.loads(data.metadata()["facts"])))
            else:
                Saved(number, kind, files, {}).remove()
        return found

    def _reject(self, name: str, files: tuple[Path, ...], wrong: list[str]) -> None:
        """Warn that a checkpoint is damaged, and rename its files, so that they are not read again."""
        instead = "what it held is computed again" if name.endswith("result") else "the one before it is used"
        cause = f"{wrong[0]} holds other bytes than were written" if wrong else "so another process says"
        self.warn(f"checkpoint {name} is damaged ({cause}); {instead}")
        processes.barrier(f"{name} rejected")
        for file in files if processes.first_process() else ():
            file.rename(file.with_name(f"damaged-{file.name}-{time.time_ns()}"))


def _digest(file: Path) -> str:
    with file.open("rb") as data:
        return file_digest(data, "blake2b").hexdigest()[:32]


def _write(file: Path, arrays: Mapping[str, ClientRows], header: dict[str, str]) -> None:
    """Write the blocks of rows that belong to this process into one file."""
    blocks = {f"{name}@{start}": block for name, rows in arrays.items() for start, block in _own_blocks(rows)}
    save_file(blocks, file, header)
    sync(file)


def _own_blocks(rows: ClientRows) -> Iterator[tuple[int, np.ndarray]]:
    """Yield the blocks of an array that this process writes, each with the number of its first row."""
    array, axis, count = rows
    blocks = [(0, array)] if processes.first_process() else []
    if processes.spread(array):
        shards = [shard for shard in array.addressable_shards if shard.replica_id == 0]
        blocks = [(0 if axis is None else shard.index[axis].start or 0, shard.data) for shard in shards]
    for start, block in blocks:
        if axis is not None:
            block = block[(slice(None),) * axis + (slice(max(count - start, 0)),)]
        if axis is None or block.shape[axis] or not count:
            yield start, np.asarray(block, order="C")
