"""Lock a folder, so that only one process at a time works in it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from hyperpush.base.errors import HyperpushError, InUse

GRACE = 0.5  # seconds to try to get a lock, because `is_held` may hold it for less than a millisecond


@contextmanager
def alone(lock: Path, field: str, folder: Path) -> Iterator[None]:
    """Hold the lock of a folder in the block. The operating system releases the lock if the process is killed.

    Args:
        lock: The lock file.
        field: Name of the argument in error messages about the folder.
        folder: The folder, as error messages show it.

    Raises:
        InUse: Another live process holds the lock.
        HyperpushError: The file system does not support locks.
    """
    held = FileLock(lock, timeout=GRACE, poll_interval=0.01, mode=0o600)
    try:
        held.acquire()
    except Timeout:
        raise in_use(field, folder) from None
    except (OSError, NotImplementedError) as error:  # some network file systems lack locks
        raise HyperpushError(f"{lock.parent} cannot be locked: {error}; use a folder on another disk") from None
    try:
        yield
    finally:
        held.release()


def in_use(field: str, folder: Path) -> InUse:
    """Return the error for a folder that another process works in."""
    return InUse(f"{field}: another process works in {folder}; end it first, or take another folder")


def is_held(lock: Path) -> bool:
    """Return True if a live process holds the lock."""
    if not lock.exists():
        return False
    probe = FileLock(lock, blocking=False)
    try:
        probe.acquire()
    except Timeout:
        return True
    probe.release()
    return False
