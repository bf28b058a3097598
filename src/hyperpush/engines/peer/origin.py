"""Digests of a party's inputs in a run: its data, its initial state, the problem, and the secret of its random draws.

A checkpoint holds these digests, and can be continued only with the same inputs. The key of a party's secret draws also
depends on the inputs, and on a number that is new at every fresh start. Otherwise equal noise could be added to two
different values, and their difference would be revealed.
"""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PRNGKeyArray, PyTree

from hyperpush.base.errors import InvalidInput
from hyperpush.base.files import write_atomically
from hyperpush.engines.keys import as_bits

SECRET_BYTES = 32
MEANING = {
    "data": "the same data",
    "start": "the same params and hypers at the start",
    "problem": "the same problem: costs, method and their numbers",
    "secret": "the same secret",
}


@final
@dataclass(frozen=True)
class Origin:
    """Digests of a party's inputs, in hexadecimal; `secret` is empty without a secret."""

    data: str
    start: str
    problem: str
    secret: str = ""

    def to_table(self) -> dict[str, str]:
        """Return the digests by name, as stored in a checkpoint."""
        return {name: getattr(self, name) for name in MEANING}

    def check(self, stored: Mapping[str, str], path: Path) -> None:
        """Raise InvalidInput for a checkpoint with other inputs, and name the input that has changed."""
        for name, allowed in MEANING.items():
            if stored.get(name) != getattr(self, name):
                given = f"one that began with another {name}" if name != "data" else "one that began with other data"
                remedy = "to start anew, remove it" + (": its releases still count" if self.secret else "")
                raise InvalidInput("checkpoint", given, f"{allowed} as in {path}; {remedy}")


def arrays_digest(tree: PyTree) -> str:
    """Return a digest of the bytes, types and shapes of arrays."""
    digest = blake2b(digest_size=16)
    for leaf in jax.tree.leaves(tree):
        bits = np.asarray(as_bits(jnp.asarray(leaf)))
        digest.update(f"{bits.dtype}{bits.shape}".encode() + np.ascontiguousarray(bits).tobytes())
    return digest.hexdigest()


def problem_digest(code: bytes, parts: Any) -> str:
    """Return a digest of a program's code and of the numbers and arrays in its parts."""
    numbers = [leaf for leaf in jax.tree.leaves(parts) if isinstance(leaf, int | float) or hasattr(leaf, "dtype")]
    return blake2b(code + arrays_digest(numbers).encode(), digest_size=16).hexdigest()


def new_start() -> str:
    """Return a new random identifier for a fresh start of a party."""
    return secrets.token_hex(16)


def read_secret(path: Path, resumes: bool = False) -> bytes:
    """Return the secret bytes in a file. Create a missing file, unless the party resumes from a checkpoint."""
    if not path.exists():
        if resumes:
            raise InvalidInput("secret", f"{path}, which is missing", "the file that belongs to the checkpoint")
        try:
            write_atomically(path, secrets.token_bytes(SECRET_BYTES), mode=0o600)
        except OSError as error:
            raise InvalidInput("secret", str(path), f"a file that can be written ({error.strerror})") from None
    try:
        own = path.read_bytes()
    except OSError as error:
        raise InvalidInput("secret", str(path), f"a file that can be read ({error.strerror})") from None
    if len(own) != SECRET_BYTES:
        allowed = f"{SECRET_BYTES} bytes; remove the file to start anew"
        raise InvalidInput(str(path), f"{len(own)} bytes", allowed)
    return own


def secret_digest(secret: bytes) -> str:
    """Return a digest that identifies a secret without revealing it."""
    return blake2b(b"which secret", key=secret, digest_size=16).hexdigest()


def draws_key(secret: bytes, digest: bytes, origin: Origin, start: str) -> PRNGKeyArray:
    """Return the key of a party's secret draws, derived from its secret, the run, its inputs and this start."""
    said = digest + "".join((origin.data, origin.start, origin.problem, start)).encode()
    made = blake2b(said, key=secret, digest_size=8).digest()
    return jax.random.wrap_key_data(jnp.frombuffer(made, jnp.uint32))
