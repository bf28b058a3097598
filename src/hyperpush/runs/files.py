"""Files that are there as a whole or not at all."""

import os
from pathlib import Path


def write_atomically(path: Path, data: bytes | str) -> None:
    """Write a file so that others, and whoever comes after a crash, find the old contents or the new ones.

    Raises:
        OSError: It could not be written; the old file is as it was.
    """
    new = path.with_name(f".{path.name}.new")
    with new.open("wb") as file:
        file.write(data.encode() if isinstance(data, str) else data)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
