"""Write files as a whole or not at all, and check paths that users give."""

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from hyperpush.base.errors import HyperpushError, InvalidInput


def write_atomically(path: Path, data: bytes | str, durable: bool = True, mode: int = 0o666) -> None:
    """Write a file so that readers find either the old or the new contents, never a part.

    Args:
        path: The file.
        data: The new contents.
        durable: True waits for the disk, so that the guarantee also holds after a power cut; False does not wait.
        mode: Permissions of the file, from which the process's umask is subtracted.

    Raises:
        OSError: The file could not be written; the old file is unchanged.
    """
    write_together({path: data}, durable, mode)


def write_together(files: Mapping[Path, bytes | str], durable: bool = True, mode: int = 0o666) -> None:
    """Write several files like `write_atomically`. All contents are on disk before the first file is replaced.

    Raises:
        OSError: A file could not be written; all old files are unchanged.
    """
    staged = {path: path.with_name(f".{path.name}.new") for path in files}
    try:
        for path, data in files.items():
            _write_anew(staged[path], data, durable, mode)
    except OSError:
        for new in staged.values():
            with suppress(OSError):
                new.unlink(missing_ok=True)
        raise
    for path, new in staged.items():
        new.replace(path)
    if durable:
        for folder in {path.parent for path in files}:
            sync(folder)


def _write_anew(new: Path, data: bytes | str, durable: bool, mode: int) -> None:
    new.unlink(missing_ok=True)
    new.touch(mode)
    with new.open("wb") as file:
        file.write(data.encode() if isinstance(data, str) else data)
        if durable:
            file.flush()
            os.fsync(file.fileno())


def unwritten(what: str, error: Exception, before: bool = False) -> HyperpushError:
    """Return the error for a file `what`, such as a checkpoint, that could not be written.

    With `before=True`, the message says that the previous file is intact.
    """
    said = getattr(error, "strerror", None) or str(error)
    cause = "the disk is full" if "No space left" in said else said
    return HyperpushError(f"{what} could not be written: {cause}" + ("; the one before it is good" if before else ""))


def as_path(field: str, given: object, kind: str = "folder") -> Path:
    """Return the path that a user gave, with `~` replaced by the home folder; raise InvalidInput if it is invalid."""
    if not isinstance(given, str | Path) or not str(given):
        raise InvalidInput(field, given, f"the name of a {kind}")
    try:
        path = Path(given).expanduser()
    except RuntimeError as error:  # `~name` for a user who does not exist
        raise InvalidInput(field, str(given), f"the name of a {kind} ({error})") from None
    return path.resolve() if path.name in ("", "..") else path


def sync(path: Path) -> None:
    """Wait until the contents of a file, or the file names of a folder, are on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
