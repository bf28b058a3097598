"""One process at a time in a folder."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hyperpush.errors import HyperpushError, InvalidInput


@contextmanager
def alone(lock: Path, field: str, folder: Path, allowed: str) -> Iterator[None]:
    """Refuse a folder whose lock another live process holds; where there are no such locks (Windows), trust the user.

    The lock goes with the process, however it ends.
    """
    try:
        import fcntl
    except ImportError:
        yield
        return
    with lock.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise InvalidInput(field, str(folder), f"{allowed} ({file.read().strip() or 'one is'})") from None
        except OSError as error:
            said = f"{lock.parent} cannot be locked: {error.strerror}; use a folder on another disk"
            raise HyperpushError(said) from None
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()} is\n")
        file.flush()
        yield
