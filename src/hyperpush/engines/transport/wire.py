"""Format of messages between peers: a fixed header, the leaves of a pytree and a checksum.

    header    64 bytes: magic, version, kind, view, node, step, sender, counter, weight, digest of the tree
    leaves    per leaf: its elements in C order
    checksum  CRC32 of all bytes before it (u32); for more than 64 KiB see `checksum`

All numbers are little-endian. Leaves start at multiples of 8 bytes, so that they can be read in place. The receiver
knows the expected form (`Template`). A message does not contain its sizes: the digest of its tree (paths, types and
shapes of the leaves) must equal the expected one.
"""

import math
import struct
import zlib
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from functools import lru_cache
from hashlib import blake2b
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np

from hyperpush.base.errors import HyperpushError, InvalidInput

VERSION = 5
"""Version of the format. Control messages and parts of messages contain it, too."""

_MAGIC = b"hpsh"
_HEADER = struct.Struct("<4sHBxIIQI4xQd16s")
_CHECKSUM_BYTES = 4
_ALIGNMENT = 8
_SHORT, _WIDTH = 1 << 16, 1021  # see `checksum`: bytes of short data, and words in a row
_DTYPES = frozenset(
    np.dtype(dtype).name
    for dtype in (
        *(np.bool_, np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64),
        *(np.float16, jnp.bfloat16, np.float32, np.float64),
    )
)


class Kind(IntEnum):
    """Kinds of messages; the kind is a field of the header."""

    MESSAGE = 0  # a message that is used in its own round only, with its weight
    TOTAL = 1  # the running sum of a link
    LAST_TOTAL = 2  # a total from a sender that adds nothing more to this link for now
    TRANSFER = 3  # a total from a sender that has transferred its whole mass, and must not get more
    SEEN = 4  # acknowledgment that the total with this counter was received
    DURABLE = 5  # acknowledgment that the total with this counter was also saved

    @property
    def last(self) -> bool:
        """True if the sender adds nothing more to the link for now."""
        return self in (Kind.LAST_TOTAL, Kind.TRANSFER)

    @property
    def acknowledges(self) -> bool:
        """True for an acknowledgment of a total."""
        return self in (Kind.SEEN, Kind.DURABLE)


class RefusalReason(StrEnum):
    """Reasons for refusing a message, in the order of the checks."""

    TOO_SHORT = "too-short"
    BAD_MAGIC = "bad-magic"
    WRONG_VERSION = "wrong-version"
    WRONG_KIND = "wrong-kind"
    BAD_CHECKSUM = "bad-checksum"
    WRONG_SENDER = "wrong-sender"
    WRONG_STRUCTURE = "wrong-structure"
    OVERSIZED = "oversized"
    NOT_BOOLEAN = "not-boolean"
    NOT_FINITE = "not-finite"
    # Only a peer can check the next four, because it knows the program and its place in it.
    WRONG_NODE = "wrong-node"
    WRONG_VIEW = "wrong-view"
    WRONG_WEIGHT = "wrong-weight"
    WRONG_MASS = "wrong-mass"
    # Only a transport can check the reasons below, before a message is decoded.
    BAD_PART = "bad-part"
    BAD_CONTROL = "bad-control"
    OVERFLOW = "overflow"
    INCOMPLETE = "incomplete"
    ANOTHER_RUN = "another-run"
    ANOTHER_INCARNATION = "another-incarnation"
    ANOTHER_CONFIGURATION = "another-configuration"
    ANOTHER_CODE = "another-code"
    ANOTHER_JAX = "another-jax"
    EXPIRED = "expired-certificate"

    @property
    def words(self) -> str:
        """The reason as text, such as "bad checksum"."""
        return self.value.replace("-", " ")

    @property
    def of_content(self) -> bool:
        """True if the message arrived intact, from the right run and sender, but its content is invalid."""
        return self in _CONTENT

    @property
    def of_identity(self) -> bool:
        """True if another process with the same certificate may have sent the message."""
        return self in _IDENTITY


_IDENTITY = frozenset(
    (
        RefusalReason.WRONG_VERSION,
        RefusalReason.ANOTHER_RUN,
        RefusalReason.ANOTHER_INCARNATION,
        RefusalReason.ANOTHER_CONFIGURATION,
        RefusalReason.ANOTHER_CODE,
        RefusalReason.ANOTHER_JAX,
        RefusalReason.EXPIRED,
    )
)
_CONTENT = frozenset(
    (
        RefusalReason.WRONG_STRUCTURE,
        RefusalReason.NOT_BOOLEAN,
        RefusalReason.NOT_FINITE,
        RefusalReason.WRONG_WEIGHT,
        RefusalReason.WRONG_MASS,
    )
)


class Rejected(HyperpushError):
    """Raised for an invalid message, which must not change the state; the caller counts and drops it."""

    def __init__(self, reason: RefusalReason, detail: str):
        self.reason, self.detail = reason, detail
        super().__init__(f"message rejected, {reason}: {detail}")


_KINDS = frozenset(Kind)


@final
@dataclass(frozen=True)
class Header:
    """Header of a message.

    A message belongs to a `view` of the membership and a `node` of the program. `sender` sent it at `step`. A running
    sum also has a `counter`, which increases on its link. A message of one round has a `weight`, by which the receiver
    multiplies the content.
    """

    view: int
    node: int
    step: int
    sender: int
    counter: int = 0
    weight: float = 1.0
    kind: Kind = Kind.MESSAGE


@final
class Template:
    """Expected form of a message: a tree like `example`, whose leaves are arrays, numbers or `jax.ShapeDtypeStruct`s.

    Floats must be finite. With `allow_infinite`, ±inf (the neutral element of a maximum) is valid, too, but not NaN.
    """

    def __init__(self, example: Any, allow_infinite: bool = False):
        leaves, self.treedef = jax.tree.flatten(example)
        self.allow_infinite = allow_infinite
        described = tuple(_describe(leaf) for leaf in leaves)
        self.digest = _digest(self.treedef, described)
        offset = _HEADER.size
        self.leaves: list[tuple[np.dtype, tuple[int, ...], int]] = []  # type, shape and offset of each leaf
        for dtype, shape in described:
            self.leaves.append((dtype, shape, offset))
            offset += _align(math.prod(shape) * dtype.itemsize)
        self.size = offset + _CHECKSUM_BYTES
        """The length of every valid message, in bytes."""


def checksum(data: bytes | bytearray | memoryview) -> int:
    """Return a checksum that detects accidental damage, but not an attack.

    For up to 64 KiB it is the CRC32 of the data. Longer data are laid out in rows of 1021 words of 64 bits. Their
    checksum is the CRC32 of the column sums (mod 2⁶⁴) and of the remaining bytes. That takes a tenth of the time, and
    still detects a changed word, or any change within a row. The width is prime, so exchanged parts of the usual sizes
    are detected, too.
    """
    view = memoryview(data)
    if len(view) <= _SHORT:
        return zlib.crc32(view)
    rows = len(view) // (_WIDTH * 8)
    words = np.frombuffer(view, "<u8", rows * _WIDTH).reshape(rows, _WIDTH)
    columns = np.add.reduce(words, axis=0, dtype=np.uint64).astype("<u8")
    return zlib.crc32(view[rows * _WIDTH * 8 :], zlib.crc32(columns.data))


def encode(header: Header, tree: Any) -> bytearray:
    """Return the message that carries `tree`, a pytree of arrays or numbers."""
    template = Template(tree)
    data = bytearray(template.size)
    numbers = header.kind, header.view, header.node, header.step, header.sender, header.counter, header.weight
    _HEADER.pack_into(data, 0, _MAGIC, VERSION, *numbers, template.digest)
    view = memoryview(data)
    for (dtype, _, offset), leaf in zip(template.leaves, jax.tree.leaves(tree), strict=True):
        raw = _to_bytes(np.asarray(leaf, dtype=dtype))
        view[offset : offset + raw.nbytes] = raw.data
    found = checksum(view[:-_CHECKSUM_BYTES])
    view[-_CHECKSUM_BYTES:] = found.to_bytes(_CHECKSUM_BYTES, "little")
    return data


def peek(data: bytes | bytearray | memoryview) -> Header:
    """Return the header of a message, to choose the template for `decode`. The checksum is not verified here."""
    return _read_header(memoryview(data))[0]


def decode(
    data: bytes | bytearray | memoryview, template: Template, expect_sender: int | None = None
) -> tuple[Header, Any]:
    """Return the header and the pytree of a message, as read-only views of `data`; raise only `Rejected`.

    `expect_sender` is the sender according to the transport, which a sender cannot forge; None skips this check.
    """
    view = memoryview(data).toreadonly()
    header, digest = _read_sealed(view, expect_sender)
    if digest != template.digest:
        raise Rejected(RefusalReason.WRONG_STRUCTURE, "other leaves, types or shapes than expected")
    if len(view) > template.size:
        raise Rejected(RefusalReason.OVERSIZED, f"{len(view)} bytes, at most {template.size} expected")
    if len(view) < template.size:
        raise Rejected(RefusalReason.TOO_SHORT, f"{len(view)} bytes, {template.size} expected")
    if not math.isfinite(header.weight):
        raise Rejected(RefusalReason.NOT_FINITE, f"weight {header.weight}")
    leaves = [_read_leaf(view, index, template) for index in range(len(template.leaves))]
    return header, jax.tree.unflatten(template.treedef, leaves)


def read_sealed(data: bytes | bytearray | memoryview, expect_sender: int) -> Header:
    """Return the header of a message without decoding the content. Raise `Rejected` for a wrong checksum or sender."""
    return _read_sealed(memoryview(data).toreadonly(), expect_sender)[0]


def _read_sealed(view: memoryview, expect_sender: int | None) -> tuple[Header, bytes]:
    header, digest = _read_header(view)
    if checksum(view[:-_CHECKSUM_BYTES]) != int.from_bytes(view[-_CHECKSUM_BYTES:], "little"):
        raise Rejected(RefusalReason.BAD_CHECKSUM, "damaged on the way")
    if expect_sender is not None and header.sender != expect_sender:
        raise Rejected(RefusalReason.WRONG_SENDER, f"{expect_sender} sent it and it names {header.sender}")
    return header, digest


def _read_header(view: memoryview) -> tuple[Header, bytes]:
    if len(view) < _HEADER.size + _CHECKSUM_BYTES:
        raise Rejected(RefusalReason.TOO_SHORT, f"{len(view)} bytes do not hold a header and a checksum")
    magic, version, kind, *fields, digest = _HEADER.unpack_from(view)
    if magic != _MAGIC:
        raise Rejected(RefusalReason.BAD_MAGIC, f"it starts with {magic!r} instead of {_MAGIC!r}")
    if version != VERSION:
        raise Rejected(RefusalReason.WRONG_VERSION, f"version {version}; this is version {VERSION}")
    if kind not in _KINDS:
        raise Rejected(RefusalReason.WRONG_KIND, f"kind {kind}")
    return Header(*fields, kind=Kind(kind)), digest


def _read_leaf(view: memoryview, index: int, template: Template) -> np.ndarray:
    dtype, shape, offset = template.leaves[index]
    bits = np.frombuffer(view, f"<u{dtype.itemsize}", math.prod(shape), offset)
    if dtype == np.bool_ and (bits > 1).any():
        raise Rejected(RefusalReason.NOT_BOOLEAN, f"leaf {index} holds bytes other than 0 and 1")
    array = bits.astype(f"=u{dtype.itemsize}", copy=False).view(dtype).reshape(shape)
    if jnp.issubdtype(dtype, jnp.inexact):
        bad = np.isnan(array).any() if template.allow_infinite else not np.isfinite(array).all()
        if bad:
            raise Rejected(RefusalReason.NOT_FINITE, f"leaf {index} holds values that are not finite")
    return array


def _to_bytes(array: np.ndarray) -> np.ndarray:
    # Convert through unsigned integers, because bfloat16 lacks a byte order.
    bits = np.ascontiguousarray(array).reshape(-1).view(f"=u{array.dtype.itemsize}")
    return bits.astype(f"<u{array.dtype.itemsize}", copy=False).view(np.uint8)


def _describe(leaf: Any) -> tuple[np.dtype, tuple[int, ...]]:
    """Return the type and shape of a leaf, in this machine's byte order."""
    shaped = leaf if hasattr(leaf, "dtype") and hasattr(leaf, "shape") else np.asarray(leaf)
    if shaped.dtype.name not in _DTYPES:
        raise InvalidInput("message dtype", shaped.dtype.name, ", ".join(sorted(_DTYPES)))
    return np.dtype(shaped.dtype).newbyteorder("="), tuple(shaped.shape)


def _align(size: int) -> int:
    return size + -size % _ALIGNMENT


@lru_cache(maxsize=256)
def _digest(treedef: Any, described: tuple[tuple[np.dtype, tuple[int, ...]], ...]) -> bytes:
    # Use key paths instead of the text of the treedef, which may contain addresses and differs between versions of JAX.
    paths = jax.tree_util.tree_leaves_with_path(jax.tree.unflatten(treedef, range(treedef.num_leaves)))
    lines = [f"{jax.tree_util.keystr(path)} {described[k][0].name} {described[k][1]}" for path, k in paths]
    return blake2b("\n".join(lines).encode(), digest_size=16).digest()
