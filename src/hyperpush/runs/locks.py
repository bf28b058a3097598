"""One process at a time in a folder."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from hyperpush.base.errors import HyperpushError, InvalidInput


@contextmanager
def alone(lock: Path, field: str, folder: Path, allowed: str) -> Iterator[None]:
    """Refuse a folder whose lock another live process holds. The lock ends with the process in every case."""
    held = FileLock(lock, blocking=False)
    try:
        held.acquire()
    except Timeout:
        raise InvalidInput(field, str(folder), allowed) from None
    except (OSError, NotImplementedError) as error:  # some network file systems lack locks
        raise HyperpushError(f"{lock.parent} cannot be locked: {error}; use a folder on another disk") from None
    try:
        yield
    finally:
        held.release()
