"""A peer's checkpoint, from which it continues after it was killed: two files, written in turn.

Both files are opened and locked before the run starts, so writing a checkpoint needs no new file descriptor. A crash
during a write leaves the other file intact. Each is a safetensors file, whose header holds the peer's facts as JSON, an
increasing number and a checksum. The newest intact file counts.

`hyperpush.runs.checkpoints` works differently. There several processes write their clients' rows into new files, which
get their final names when they are complete, and many checkpoints are kept. Each needs free file descriptors and a
BLAKE2b digest of whole files. A peer saves at every exchange, which must be faster.
"""

import json
import os
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, final

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from hyperpush.base.errors import HyperpushError, InvalidInput
from hyperpush.base.files import sync, unwritten
from hyperpush.base.locks import alone
from hyperpush.engines.peer.origin import Origin, new_start
from hyperpush.engines.transport.wire import checksum

VERSION = "1"
_ARRAY = "__array__"  # JSON key whose value is the number of the array in its place


def encode(facts: Mapping[str, Any]) -> tuple[str, dict[str, np.ndarray]]:
    """Return facts as JSON text, and the arrays in them by number."""
    arrays: dict[str, np.ndarray] = {}

    def put(array: np.ndarray) -> dict[str, str]:
        number = str(len(arrays))
        arrays[number] = np.ascontiguousarray(array).reshape(array.shape)
        return {_ARRAY: number}

    return json.dumps(facts, default=put), arrays


def decode(text: str, arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Return the facts from the results of `encode`."""
    return json.loads(text, object_hook=lambda found: arrays[found[_ARRAY]] if _ARRAY in found else found)


def _sum(arrays: Mapping[str, np.ndarray], text: str) -> str:
    """Return a checksum of a checkpoint's contents, which detects a mixture of two checkpoints."""
    sums = [checksum(np.ascontiguousarray(each).reshape(-1).view(np.uint8).data) for each in arrays.values()]
    return f"{checksum(text.encode()):08x}" + "".join(f"{each:08x}" for each in sums)


def in_turn(path: Path) -> tuple[Path, Path]:
    """Return the two files of a checkpoint at a path, which are written in turn."""
    return path, path.with_name(f"{path.stem}-2{path.suffix}")


def lock_of(path: Path) -> Path:
    """Return the lock file of the checkpoint at a path."""
    return path.with_name(f".{path.name}.lock")


def all_files(path: Path) -> tuple[Path, ...]:
    """Return all files of the checkpoint at a path."""
    return (*in_turn(path), lock_of(path))


@final
class Checkpoint:
    """A `PeerStore` in two files: `path`, and a second one in the same folder.

    Args:
        path: The first file.
        digest: Digest of the configuration.
        origin: Digests of the party's inputs. None accepts a checkpoint with any inputs.
    """

    def __init__(self, path: Path, digest: bytes, origin: Origin | None = None):
        self.origin = origin
        self.paths = in_turn(path)
        self.digest = digest.hex()
        self.start = new_start()  # identifier of this start; `load` replaces it by the stored one
        self._number = 0  # number of the newest checkpoint
        self._newest = 1  # index, in `paths`, of the file with the newest checkpoint
        self._open: list[int] = []  # descriptors of both files
        self._held = ExitStack()  # releases the lock when closed

    @staticmethod
    def exists(path: Path) -> bool:
        """Return True if a checkpoint was written at a path."""
        return any(each.exists() and each.stat().st_size for each in Checkpoint(path, b"").paths)

    def prepare(self) -> None:
        """Lock and open both files, so that saving needs no more descriptors."""
        if self._open:
            return
        self._held.enter_context(alone(lock_of(self.paths[0]), "checkpoint", self.paths[0]))
        try:
            for path in self.paths:
                self._open.append(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
            sync(self.paths[0].parent)
        except OSError as error:
            self.close()
            raise self._unwritten(error) from None

    def save(self, facts: Mapping[str, Any]) -> None:
        """See `PeerStore.save`."""
        self.prepare()
        text, arrays = encode(facts)
        origin = "" if self.origin is None else json.dumps(self.origin.to_table())
        about = {"version": VERSION, "digest": self.digest, "origin": origin, "start": self.start, "facts": text}
        about |= {"number": str(self._number + 1), "sum": _sum(arrays, text)}
        place = 1 - self._newest
        try:
            _write(self._open[place], save(arrays, about))
        except OSError as error:
            raise self._unwritten(error) from None
        self._newest, self._number = place, self._number + 1

    def _unwritten(self, error: OSError) -> HyperpushError:
        return unwritten(f"the checkpoint {self.paths[0]}", error, self._number > 0)

    def load(self) -> dict[str, Any] | None:
        """See `PeerStore.load`."""
        found, failures = [], []
        for place, path in enumerate(self.paths):
            try:
                if path.exists() and path.stat().st_size:
                    header, facts = _read(path)
                    found.append((int(header["number"]), place, header, facts))
            except (OSError, SafetensorError, KeyError, ValueError) as error:
                failures.append((path, error))
        if not found:
            return self._find_nothing(failures)
        self._number, self._newest, header, facts = max(found, key=lambda each: each[0])
        self._check(header)
        self.start = header["start"]
        return facts

    def _find_nothing(self, failures: list[tuple[Path, Exception]]) -> None:
        """Raise InvalidInput for unreadable files, unless there is one file only and it is truncated.

        A truncated first checkpoint is harmless, because no message was sent before it was complete.
        """
        if not failures or (len(failures) == 1 and isinstance(failures[0][1], SafetensorError)):
            return
        path, error = failures[0]
        raise InvalidInput("checkpoint", str(path), f"a checkpoint that can be read ({error})") from None

    def _check(self, header: Mapping[str, str]) -> None:
        """Raise InvalidInput for a checkpoint of another configuration or with other inputs."""
        path = self.paths[self._newest]
        if header["digest"] != self.digest:
            given = f"one of configuration {header['digest'][:16]}…"
            raise InvalidInput("checkpoint", given, f"one of configuration {self.digest[:16]}…: {path}")
        if self.origin is not None:
            self.origin.check(json.loads(header["origin"] or "{}"), path)

    def close(self) -> None:
        """Close both files, and release their lock."""
        while self._open:
            os.close(self._open.pop())
        self._held.close()

    def remove(self) -> None:
        """Delete all files, because the run is over."""
        self.close()
        for path in all_files(self.paths[0]):
            path.unlink(missing_ok=True)


def _read(path: Path) -> tuple[Mapping[str, str], dict[str, Any]]:
    """Return the header and the facts of one file; raise an error if it is damaged."""
    with safe_open(path, framework="numpy") as file:
        header = file.metadata() or {}
        arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    if header.get("version") != VERSION:
        raise ValueError(f"version {header.get('version')}, not {VERSION}")
    in_order = {name: arrays[name] for name in sorted(arrays, key=int)}
    if header["sum"] != _sum(in_order, header["facts"]):
        raise ValueError("its checksum is wrong: parts of it belong to another checkpoint")
    return header, decode(header["facts"], arrays)


def _write(file: int, data: bytes) -> None:
    """Replace the contents of an open file, and wait for the disk."""
    view, at = memoryview(data), 0
    while at < len(view):
        at += os.pwrite(file, view[at:], at)
    os.ftruncate(file, len(view))
    os.fsync(file)
