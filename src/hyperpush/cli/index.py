"""Index for `list`, `show` and shell completion, kept as JSON so that they need not import JAX.

The index is made on first use, by importing all modules, and kept in the user's cache folder. It is made anew when a
file has changed, of this package or of packages that extend it by entry points.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypedDict

import hyperpush
from hyperpush.base.extensions import GROUPS, distribution, extension_files, extensions
from hyperpush.base.files import write_atomically
from hyperpush.base.settings import cache_folder

FILE = "index.json"
COLUMNS = ("name", "network", "target", "note", "fixed_point", "sends", "paper", "matrices")  # of a table of methods
Rows = Sequence[Sequence[str]]


class Index(TypedDict):
    """All names, with their texts."""

    stamp: str  # digest of the code that it was made from
    studies: Rows  # name, summary
    networks: Rows  # name, class, summary
    methods: Mapping[str, Rows]  # by title; the columns are those of `COLUMNS`
    names: list[str]  # names that `show` takes
    options: dict[str, str]  # TOML by plain name
    keys: dict[str, list[str]]  # dotted keys of the options of each study
    broken: dict[str, str]  # errors of extensions that cannot be loaded, by name


def load_index() -> Index:
    """Return the index from the cache, or a new one if the code has changed."""
    file, stamp = cache_folder() / FILE, code_stamp()
    with suppress(OSError, ValueError):
        kept = json.loads(file.read_text(encoding="utf-8"))
        if kept["stamp"] == stamp:
            return kept
    from hyperpush.cli.explain import describe_all  # here: it imports JAX

    made = describe_all(stamp)
    if made["broken"]:  # not cached: it may work the next time without a changed file
        return made
    with suppress(OSError):  # without a writable cache the next call only takes longer
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, json.dumps(made), durable=False)
    return made


def code_stamp() -> str:
    """Return a digest of the entry points, and of the files of all packages by time and size."""
    own = sorted(Path(hyperpush.__file__).parent.rglob("*.py"))
    files = [(str(file), (found := file.stat()).st_mtime_ns, found.st_size) for file in (*own, *extension_files())]
    points = [(each.name, each.value, distribution(each)) for group in GROUPS for each in extensions(group).values()]
    return hashlib.sha256(repr((files, points)).encode()).hexdigest()
