"""A party's folder, which is private and holds an account of all releases of the party's data."""

import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hyperpush.base.errors import HyperpushError, InvalidInput
from hyperpush.base.files import write_atomically
from hyperpush.runs.folder import make_folder
from hyperpush.verbs.budget import Budget

RELEASES = "releases.json"


@contextmanager
def private_folder(path: Path, field: str, keep_mode: bool = False) -> Iterator[None]:
    """Make a folder private to its owner. Files written in the block are private, too.

    Args:
        path: The folder.
        field: Name of the folder in errors.
        keep_mode: True keeps the folder's permissions, because the folder also holds files that are not the party's.
    """
    with private_files():
        make_folder(path, field, mode=0o700)
        try:
            if not keep_mode:
                path.chmod(0o700)
        except OSError as error:
            raise InvalidInput(field, str(path), f"a folder of your own ({error.strerror})") from None
        yield


@contextmanager
def private_files() -> Iterator[None]:
    """Make files and folders that are created in the block private to their owner.

    This works in the main thread only, because a process has a single file mode mask.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


def released_before(folder: Path, start: str) -> list[Budget]:
    """Return the privacy budgets of all fresh starts of a party except `start`."""
    return [Budget.from_table(each["budget"]) for each in _read(folder / RELEASES) if each["start"] != start]


def note_release(folder: Path, start: str, budget: Budget) -> None:
    """Add the most that a start can release to the account, before anything is sent. A resumed start counts once."""
    entries = _read(folder / RELEASES)
    if any(each["start"] == start for each in entries):
        return
    entries.append({"start": start, "time": round(time.time()), "budget": budget.to_table()})
    try:
        write_atomically(folder / RELEASES, json.dumps(entries, indent=1) + "\n", mode=0o600)
    except OSError as error:
        raise HyperpushError(f"{folder / RELEASES} cannot be written ({error.strerror}); nothing was sent") from None


def _read(path: Path) -> list[dict]:
    if not path.exists():
        return []
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
        for each in entries:
            Budget.from_table(each["budget"])
            str(each["start"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        allowed = f"the unchanged account of earlier starts ({error})"
        raise InvalidInput("releases", str(path), allowed) from None
    return entries
