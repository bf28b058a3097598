"""What a peer needs to continue after it was killed, in one file that is either the old one or the new one."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from hyperpush.base.errors import HyperpushError, InvalidInput
from hyperpush.base.files import write_atomically
from hyperpush.engines.peer.origin import Origin, new_start

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
    """The facts of which `encode` has made this."""
    return json.loads(text, object_hook=lambda found: arrays[found[_ARRAY]] if _ARRAY in found else found)


@final
class Checkpoint:
    """A `Store` in a file: safetensors, with the facts as JSON in its header. Written, synced, then renamed.

    Args:
        path: The file.
        digest: Stands for the configuration.
        origin: What the party begins with; None takes what is stored as it is.
    """

    def __init__(self, path: Path, digest: bytes, origin: Origin | None = None):
        self.path, self.origin = path, origin
        self.digest = digest.hex()
        self.start = new_start()  # of the run; what is loaded has its own

    def save(self, facts: Mapping[str, Any]) -> None:
        """See `Store.save`."""
        text, arrays = encode(facts)
        origin = "" if self.origin is None else json.dumps(self.origin.to_table())
        about = {"version": VERSION, "digest": self.digest, "origin": origin, "start": self.start, "facts": text}
        try:
            write_atomically(self.path, save(arrays, about), mode=0o600)
        except OSError as error:
            raise HyperpushError(
                f"the checkpoint {self.path} cannot be written ({error.strerror}); the one before is still there"
            ) from None

    def load(self) -> dict[str, Any] | None:
        """See `Store.load`."""
        if not self.path.exists():
            return None
        try:
            with safe_open(self.path, framework="numpy") as file:
                header = file.metadata() or {}
                arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            if header.get("version") != VERSION:
                raise ValueError(f"version {header.get('version')}, not {VERSION}")
            facts = decode(header["facts"], arrays)
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            raise InvalidInput("checkpoint", str(self.path), f"a checkpoint that can be read ({error})") from None
        if header["digest"] != self.digest:
            given = f"one of configuration {header['digest'][:16]}…"
            raise InvalidInput("checkpoint", given, f"one of configuration {self.digest[:16]}…: {self.path}")
        if self.origin is not None:
            self.origin.check(json.loads(header["origin"] or "{}"), self.path)
        self.start = header["start"]
        return facts

    def remove(self) -> None:
        """Forget it: the run is over."""
        self.path.unlink(missing_ok=True)
