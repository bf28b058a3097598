"""What `list`, `show` and shell completion print, kept as JSON so that they need not import JAX.

The index is made by importing everything once, on first use, and kept in the user's cache folder. It is made anew when
a file of the package or a distribution with an entry point has changed.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import entry_points
from pathlib import Path
from typing import TypedDict

import hyperpush
from hyperpush.imports import ENTRY_POINTS
from hyperpush.runs.files import write_atomically
from hyperpush.settings import cache_folder

FILE = "index.json"
COLUMNS = ("name", "network", "target", "note", "fixed_point", "sends", "paper", "matrices")  # of a table of methods
Rows = Sequence[Sequence[str]]


class Index(TypedDict):
    """What has a name."""

    stamp: str  # of the code that it was made from
    studies: Rows  # name, summary
    networks: Rows  # name, class, summary
    methods: Mapping[str, Rows]  # by title; the columns are those of `COLUMNS`
    names: list[str]  # of everything below
    options: dict[str, str]  # TOML by plain name


def load_index() -> Index:
    """The index from the cache, or a new one if the code has changed."""
    file, stamp = cache_folder() / FILE, code_stamp()
    with suppress(OSError, ValueError):
        kept = json.loads(file.read_text(encoding="utf-8"))
        if kept["stamp"] == stamp:
            return kept
    from hyperpush.cli.explain import describe_all  # here: it imports JAX

    made = describe_all(stamp)
    with suppress(OSError):  # a cache that cannot be written costs time, nothing else
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, json.dumps(made), durable=False)
    return made


def code_stamp() -> str:
    """A digest of the package's files, by time and size, and of the entry points that add to it."""
    root = Path(hyperpush.__file__).parent
    files = [(str(file), (found := file.stat()).st_mtime_ns, found.st_size) for file in sorted(root.rglob("*.py"))]
    points = [(each.name, each.value, each.dist and each.dist.version) for each in entry_points(group=ENTRY_POINTS)]
    return hashlib.sha256(repr((files, sorted(points))).encode()).hexdigest()
