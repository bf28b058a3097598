"""Checkpoints on disk: numbered folders, each of them whole and as it was written, or not used.

    000012-state/arrays          the arrays, written by Orbax; each process writes its own part
    000012-state/manifest.json   the facts, size and BLAKE2b digest of every other file, and in line 2 its own digest

A folder gets its name when everything in it is on disk.
"""

import json
import os
import re
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal, final

import jax
import jax.numpy as jnp
import numpy as np

from hyperpush.errors import HyperpushError
from hyperpush.processes import agree, barrier, first_process

Kind = Literal["result", "state"]
MANIFEST, ARRAYS = "manifest.json", "arrays"
NAME = re.compile(r"\d{6}-(result|state)")
_BLOCK = 1 << 22


class Damaged(HyperpushError):
    """A checkpoint that is not as it was written."""


@dataclass(frozen=True)
class Like:
    """What an array to be loaded looks like, and where it goes: on one device, or spread by `sharding`."""

    shape: tuple[int, ...]
    dtype: Any
    sharding: Any = None


@dataclass(frozen=True)
class Saved:
    """A checkpoint that was found."""

    number: int
    kind: Kind
    path: Path
    facts: dict[str, Any]


@final
class Store:
    """The checkpoints in a folder."""

    def __init__(self, folder: Path, warn: Callable[[str], None]):
        self.folder = folder
        self.warn = warn
        self._next = 0

    def save(self, kind: Kind, arrays: Sequence[Any], facts: dict[str, Any]) -> Saved:
        """Write a checkpoint; what goes wrong leaves the others as they are."""
        number, self._next = self._next, self._next + 1
        path = self.folder / f"{number:06d}-{kind}"
        new = path.with_name(f".{path.name}.new")
        try:
            if first_process():
                self.folder.mkdir(exist_ok=True)
                shutil.rmtree(new, ignore_errors=True)
                new.mkdir()
            barrier(f"checkpoint {number} begins")
            listed = [_described(array) for array in arrays]
            _write(new / ARRAYS, [_plain(array) for array in arrays if array.size])
            if first_process():
                _seal(new, {"kind": kind, "number": number, "arrays": listed, "facts": facts})
                new.rename(path)
                _sync(self.folder)
            barrier(f"checkpoint {number} ends")
        except Exception as error:  # Orbax wraps what the system says in errors of its own
            shutil.rmtree(new, ignore_errors=True)
            said = " ".join(str(error).split())
            full = "no space left" in said.lower() or getattr(error, "errno", None) == 28
            cause = "the disk is full" if full else said[:300]
            good = "; the one before it is good" if any(self.folder.glob("[0-9]*")) else ""
            raise HyperpushError(f"checkpoint {number} could not be written: {cause}{good}") from error
        return Saved(number, kind, path, facts)

    def find(self) -> list[Saved]:
        """Those with a readable manifest, newest first; what was cut off while it was written is removed."""
        found = []
        for path in sorted(self.folder.glob("*")) if self.folder.is_dir() else []:
            if path.name.startswith("."):
                if first_process():
                    shutil.rmtree(path, ignore_errors=True)
                continue
            if not NAME.fullmatch(path.name):
                continue
            self._next = max(self._next, int(path.name[:6]) + 1)
            try:
                found.append(_read(path))
            except Damaged as error:
                self.reject(path, error)
        return sorted(found, key=lambda saved: -saved.number)

    def reject(self, path: Path, error: Damaged) -> None:
        """Say what is wrong with a checkpoint and put it aside."""
        instead = "what it held is computed again" if path.name.endswith("result") else "the one before it is used"
        self.warn(f"checkpoint {path.name} is damaged ({error}); {instead}")
        barrier(f"{path.name} rejected")
        if first_process():
            path.rename(path.with_name(f"damaged-{path.name}-{time.time_ns()}"))

    def whole(self, saved: Saved) -> bool:
        """Whether a checkpoint is as it was written; if not, it is rejected."""
        wrong = None
        try:
            check(saved.path)
        except Damaged as error:
            wrong = error
        if not agree(False, wrong is not None)[1]:
            return True
        self.reject(saved.path, wrong or Damaged("so another process says"))
        return False

    def load(self, saved: Saved, places: Sequence[int], like: Sequence[Like]) -> list[Any]:
        """The arrays at these places of a checkpoint."""
        listed = json.loads(_lines(saved.path)[0])["arrays"]
        stored = [place for place, (shape, _) in enumerate(listed) if 0 not in shape]
        wanted = {}
        for place, leaf in zip(places, like, strict=True):
            if 0 not in listed[place][0]:
                wanted[str(stored.index(place))] = leaf
        read = _restore(saved.path / ARRAYS, wanted)
        found = []
        for place, leaf in zip(places, like, strict=True):
            if 0 in listed[place][0]:
                found.append(jnp.zeros(leaf.shape, leaf.dtype))
            else:
                array = read[str(stored.index(place))]
                inside = tuple(slice(size) for size in leaf.shape)  # without the padding of several processes
                found.append(array if array.shape == leaf.shape else array[inside])
        return [array if isinstance(array, jax.Array) else jnp.asarray(array) for array in found]

    def shapes(self, saved: Saved) -> list[tuple[tuple[int, ...], str]]:
        """Shape and type of every array of a checkpoint."""
        return [(tuple(shape), dtype) for shape, dtype in json.loads(_lines(saved.path)[0])["arrays"]]

    def remove(self, saved: Saved) -> None:
        """Forget a checkpoint."""
        if first_process():
            shutil.rmtree(saved.path, ignore_errors=True)

    def clear(self) -> None:
        """Forget all: the run is over."""
        if first_process():
            shutil.rmtree(self.folder, ignore_errors=True)


def check(path: Path) -> None:
    """Raise `Damaged` unless every file of a checkpoint is there and has the bytes that were written."""
    _read(path)
    listed = json.loads(_lines(path)[0])["files"]
    for name, (size, digest) in listed.items():
        file = path / name
        if not file.is_file():
            raise Damaged(f"{name} is missing")
        if file.stat().st_size != size:
            raise Damaged(f"{name} has {file.stat().st_size} bytes instead of {size}")
        if _digest(file) != digest:
            raise Damaged(f"{name} holds other bytes than were written")


def _read(path: Path) -> Saved:
    try:
        text, seal = _lines(path)
        if blake2b(text.encode(), digest_size=16).hexdigest() != seal:
            raise Damaged(f"{MANIFEST} holds other bytes than were written")
        read = json.loads(text)
        return Saved(read["number"], read["kind"], path, read["facts"])
    except FileNotFoundError:
        raise Damaged(f"{MANIFEST} is missing") from None
    except (ValueError, KeyError) as error:
        raise Damaged(f"{MANIFEST} cannot be read: {error}") from None
    except OSError as error:  # which says nothing about the checkpoint
        raise HyperpushError(f"{path / MANIFEST} cannot be read: {error.strerror}") from None


def _lines(path: Path) -> list[str]:
    lines = (path / MANIFEST).read_text(encoding="utf-8").splitlines()
    if len(lines) != 2:
        raise ValueError(f"{len(lines)} lines instead of 2")
    return lines


def _seal(folder: Path, about: dict[str, Any]) -> None:
    files = {}
    for file in sorted(each for each in folder.rglob("*") if each.is_file()):
        _sync(file)
        files[str(file.relative_to(folder))] = (file.stat().st_size, _digest(file))
    text = json.dumps({**about, "files": files})
    with (folder / MANIFEST).open("w", encoding="utf-8") as file:
        file.write(text + "\n" + blake2b(text.encode(), digest_size=16).hexdigest() + "\n")
        file.flush()
        os.fsync(file.fileno())


def _digest(file: Path) -> str:
    found = blake2b(digest_size=16)
    with file.open("rb") as data:
        while block := data.read(_BLOCK):
            found.update(block)
    return found.hexdigest()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _write(path: Path, arrays: Sequence[Any]) -> None:
    if not arrays:
        return
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path.resolve(), {str(place): array for place, array in enumerate(arrays)})


def _restore(path: Path, wanted: dict[str, Like]) -> dict[str, Any]:
    if not wanted:
        return {}
    import orbax.checkpoint as ocp

    def how(leaf: Like) -> Any:
        if leaf.sharding is None:
            return ocp.RestoreArgs(restore_type=np.ndarray)
        # Another number of processes pads the clients to another number: rows of zeros appear or go.
        return ocp.ArrayRestoreArgs(sharding=leaf.sharding, global_shape=leaf.shape, strict=False)

    handler = ocp.PyTreeCheckpointHandler()
    with ocp.Checkpointer(handler) as checkpointer:
        args = ocp.args.PyTreeRestore(
            item=dict.fromkeys(wanted, 0),
            restore_args={name: how(leaf) for name, leaf in wanted.items()},
            partial_restore=True,
        )
        return checkpointer.restore(path.resolve(), args=args)


def _described(array: Any) -> tuple[tuple[int, ...], str]:
    return tuple(array.shape), str(array.dtype)


def _plain(array: Any) -> Any:
    # Orbax takes arrays of one process only from the first.
    spread = isinstance(array, jax.Array) and not array.is_fully_addressable
    return array if spread or jax.process_count() == 1 else np.asarray(array)
