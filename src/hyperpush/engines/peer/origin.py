"""What a party's part in a run comes from: its data, its start, the problem, and the secret of its draws.

A checkpoint holds the digests of all of them, so that it is continued with the same ones only. The key of a party's own
draws follows from them, too, and from a number that is new at every fresh start: the same noise on two values would
give both away.
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
    """Digests of what a party began with, in hexadecimal; without a secret that one is empty."""

    data: str
    start: str
    problem: str
    secret: str = ""

    def to_table(self) -> dict[str, str]:
        """By name, as a checkpoint holds them."""
        return {name: getattr(self, name) for name in MEANING}

    def check(self, stored: Mapping[str, str], path: Path) -> None:
        """Refuse a checkpoint of another origin, naming what has changed since."""
        for name, allowed in MEANING.items():
            if stored.get(name) != getattr(self, name):
                given = f"one that began with another {name}" if name != "data" else "one that began with other data"
                remedy = "to start anew, remove it" + (": what was released then counts, too" if self.secret else "")
                raise InvalidInput("checkpoint", given, f"{allowed} as in {path}; {remedy}")


def arrays_digest(tree: PyTree) -> str:
    """A digest of the bytes, types and shapes of arrays."""
    digest = blake2b(digest_size=16)
    for leaf in jax.tree.leaves(tree):
        bits = np.asarray(as_bits(jnp.asarray(leaf)))
        digest.update(f"{bits.dtype}{bits.shape}".encode() + np.ascontiguousarray(bits).tobytes())
    return digest.hexdigest()


def problem_digest(code: bytes, parts: Any) -> str:
    """A digest of a program's code and of the numbers and arrays in its parts."""
    numbers = [leaf for leaf in jax.tree.leaves(parts) if isinstance(leaf, int | float) or hasattr(leaf, "dtype")]
    return blake2b(code + arrays_digest(numbers).encode(), digest_size=16).hexdigest()


def new_start() -> str:
    """What tells one fresh start of a party from all others."""
    return secrets.token_hex(16)


def read_secret(path: Path, resumes: bool = False) -> bytes:
    """The secret bytes of a file, which is written if it is missing, unless the party resumes with them."""
    if not path.exists():
        if resumes:
            raise InvalidInput("secret", f"{path}, which is missing", "the file that the checkpoint was made with")
        write_atomically(path, secrets.token_bytes(SECRET_BYTES), mode=0o600)
    own = path.read_bytes()
    if len(own) != SECRET_BYTES:
        allowed = f"{SECRET_BYTES}, as it was written; remove it to start anew"
        raise InvalidInput(str(path), f"{len(own)} bytes", allowed)
    return own


def secret_digest(secret: bytes) -> str:
    """What tells a secret from another without giving it away."""
    return blake2b(b"which secret", key=secret, digest_size=16).hexdigest()


def draws_key(secret: bytes, digest: bytes, origin: Origin, start: str) -> PRNGKeyArray:
    """The key of a party's own draws: of its secret, the run, its data and problem, and this start."""
    said = digest + "".join((origin.data, origin.start, origin.problem, start)).encode()
    made = blake2b(said, key=secret, digest_size=8).digest()
    return jax.random.wrap_key_data(jnp.frombuffer(made, jnp.uint32))
