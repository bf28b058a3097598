"""A peer's checkpoint, from which it continues after it was killed: two files, written in turn.

Both are opened before the run starts. So a checkpoint can be written when the process has no file left to open, and a
crash while one is written leaves the other. Each is a safetensors file with the facts as JSON in its header, a number
that grows, and a checksum. The newest one that is whole counts.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from hyperpush.base.errors import HyperpushError, InvalidInput
from hyperpush.base.files import sync
from hyperpush.engines.peer.origin import Origin, new_start
from hyperpush.engines.transport.wire import checksum

VERSION = "6"
_ARRAY = "__array__"  # in JSON: the number of an array that stands in its place


def encode(facts: Mapping[str, Any]) -> tuple[str, dict[str, np.ndarray]]:
    """Facts as JSON, and the arrays in them by number."""
    arrays: dict[str, np.ndarray] = {}

    def put(array: np.ndarray) -> dict[str, str]:
        number = str(len(arrays))
        arrays[number] = np.ascontiguousarray(array).reshape(array.shape)
        return {_ARRAY: number}

    return json.dumps(facts, default=put), arrays


def decode(text: str, arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """The facts that `encode` was given."""
    return json.loads(text, object_hook=lambda found: arrays[found[_ARRAY]] if _ARRAY in found else found)


def _sum(arrays: Mapping[str, np.ndarray], text: str) -> str:
    """A checksum of all that a checkpoint holds: parts of two of them do not pass for one."""
    sums = [checksum(np.ascontiguousarray(each).reshape(-1).view(np.uint8).data) for each in arrays.values()]
    return f"{checksum(text.encode()):08x}" + "".join(f"{each:08x}" for each in sums)


@final
class Checkpoint:
    """A `PeerStore` in two files, `path` and a second one beside it.

    Args:
        path: The first file.
        digest: Stands for the configuration.
        origin: Digests of what the party begins with; None takes what is stored as it is.
    """

    def __init__(self, path: Path, digest: bytes, origin: Origin | None = None):
        self.origin = origin
        self.paths = path, path.with_name(f"{path.stem}-2{path.suffix}")
        self.digest = digest.hex()
        self.start = new_start()  # of the run; what is loaded has its own
        self._number = 0  # of the newest checkpoint
        self._newest = 1  # place of its file
        self._open: list[int] = []  # descriptors of both files

    @staticmethod
    def exists(path: Path) -> bool:
        """True if there is something to continue from."""
        return any(each.exists() and each.stat().st_size for each in Checkpoint(path, b"").paths)

    def prepare(self) -> None:
        """Open both files, so that saving needs no more descriptors."""
        if self._open:
            return
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
        said = f"the checkpoint {self.paths[0]} cannot be written ({error.strerror})"
        return HyperpushError(f"{said}; the one before is still there" if self._number else said)

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
        """Refuse files that cannot be read, but for the very first one if it was cut off: then nothing was sent yet."""
        if not failures or (len(failures) == 1 and isinstance(failures[0][1], SafetensorError)):
            return
        path, error = failures[0]
        raise InvalidInput("checkpoint", str(path), f"a checkpoint that can be read ({error})") from None

    def _check(self, header: Mapping[str, str]) -> None:
        """Refuse a checkpoint of another run."""
        path = self.paths[self._newest]
        if header["digest"] != self.digest:
            given = f"one of configuration {header['digest'][:16]}…"
            raise InvalidInput("checkpoint", given, f"one of configuration {self.digest[:16]}…: {path}")
        if self.origin is not None:
            self.origin.check(json.loads(header["origin"] or "{}"), path)

    def close(self) -> None:
        """Close both files."""
        while self._open:
            os.close(self._open.pop())

    def remove(self) -> None:
        """Forget it: the run is over."""
        self.close()
        for path in self.paths:
            path.unlink(missing_ok=True)


def _read(path: Path) -> tuple[Mapping[str, str], dict[str, Any]]:
    """The header and the facts of one file; raises an error if it is not whole."""
    with safe_open(path, framework="numpy") as file:
        header = file.metadata() or {}
        arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    if header.get("version") != VERSION:
        raise ValueError(f"version {header.get('version')}, not {VERSION}")
    in_order = {name: arrays[name] for name in sorted(arrays, key=int)}
    if header["sum"] != _sum(in_order, header["facts"]):
        raise ValueError("a part of it is of another checkpoint")
    return header, decode(header["facts"], arrays)


def _write(file: int, data: bytes) -> None:
    """Replace the contents of an open file, and wait for the disk."""
    view, at = memoryview(data), 0
    while at < len(view):
        at += os.pwrite(file, view[at:], at)
    os.ftruncate(file, len(view))
    os.fsync(file)
