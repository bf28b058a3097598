"""Files of published data sets: found in the folder that HYPERPUSH_DATA names, unpacked, and turned into arrays."""

import gzip
import lzma
import math
import os
import zlib
from pathlib import Path

import numpy as np
from jaxtyping import Int64, UInt8

from hyperpush.base.errors import InvalidInput

FOLDER = "HYPERPUSH_DATA"
PACKINGS = ("", ".gz", ".xz")
_MAGIC = {1: 0x801, 3: 0x803}  # IDX: bytes, in this number of dimensions


def folder() -> Path | None:
    """Return the folder that the environment names; None without one."""
    named = os.environ.get(FOLDER)
    if not named:
        return None
    if not Path(named).is_dir():
        raise InvalidInput(FOLDER, named, "a folder that exists, or unset")
    return Path(named)


def required_folder(inside: str) -> Path:
    """The folder that the environment names, where a data set is asked for that lies inside it."""
    found = folder()
    if found is None:
        raise InvalidInput(FOLDER, None, f"a folder that holds {inside}: set this environment variable")
    return found


def find(path: Path) -> Path | None:
    """The file itself or a packed one beside it; None if there is neither."""
    for packing in PACKINGS:
        if (packed := path.with_name(path.name + packing)).is_file():
            return packed
    return None


def unpack(path: Path) -> bytes:
    """Read a file, unpacking gzip or xz by its name."""
    try:
        raw = path.read_bytes()
        if path.suffix == ".gz":
            return gzip.decompress(raw)
        return lzma.decompress(raw, lzma.FORMAT_XZ) if path.suffix == ".xz" else raw
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        reason = getattr(error, "strerror", None) or error
        kind = {".gz": "a gzipped file", ".xz": "a file packed by xz"}.get(path.suffix, "a file")
        raise file_error(path, f"{kind} that can be read ({reason})") from None


def file_error(path: Path, allowed: str, found: str = "") -> InvalidInput:
    """Return the error for a file with unexpected content."""
    return InvalidInput(FOLDER, f"{path}: {found}" if found else str(path), allowed)


def idx(path: Path, dimensions: int) -> UInt8[np.ndarray, "..."]:
    """The array in an IDX file: magic number and sizes as big-endian 32-bit words, then one byte per entry."""
    raw, head = unpack(path), 4 * (1 + dimensions)
    allowed = f"an IDX file of bytes in {dimensions} dimensions, complete"
    if len(raw) < head:
        raise file_error(path, allowed, f"{len(raw)} bytes")
    magic, *shape = np.frombuffer(raw[:head], ">u4").tolist()  # Python's numbers: their product does not overflow
    if magic != _MAGIC[dimensions]:
        raise file_error(path, f"{allowed}: magic number {_MAGIC[dimensions]:#x}", f"magic number {magic:#x}")
    size = head + math.prod(shape)
    if len(raw) != size or size == head:
        sizes = "×".join(map(str, shape))
        raise file_error(path, f"{allowed}: {size} bytes, {sizes} of them entries, at least 1", f"{len(raw)} bytes")
    return np.frombuffer(raw, np.uint8, offset=head).reshape(shape)


def records(path: Path, labels: int) -> tuple[Int64[np.ndarray, "m labels"], UInt8[np.ndarray, "m 32 32 3"]]:
    """Read labels and images of CIFAR's binary files: `labels` bytes, then 32×32 of red, of green and of blue."""
    raw, size = unpack(path), labels + 3 * 32 * 32
    if not raw or len(raw) % size:
        raise file_error(path, f"complete records of {size} bytes", f"{len(raw)} bytes")
    rows = np.frombuffer(raw, np.uint8).reshape(-1, size)
    return rows[:, :labels].astype(np.int64), np.moveaxis(rows[:, labels:].reshape(-1, 3, 32, 32), 1, 3)
