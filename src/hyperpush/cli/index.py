"""Keep the index for `list`, `show` and shell completion as JSON, so that these commands need not import JAX.

The index is made at the first use, by importing all modules, and kept in the user's cache folder. It is made again when
a file of this package, or of a package that extends it by entry points, has changed.
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
COLUMNS = ("name", "network", "target", "note", "fixed_point", "sends", "paper", "matrices")  # in a table of methods
Rows = Sequence[Sequence[str]]


class Index(TypedDict):
    """All names that `list` and `show` know, with their texts."""

    stamp: str  # digest of the code from which the index was made
    studies: Rows  # columns: name, summary
    networks: Rows  # columns: name, class, summary
    methods: Mapping[str, Rows]  # by title of the table; the columns are those of `COLUMNS`
    names: list[str]  # names that `show` takes
    options: dict[str, str]  # text that `show` prints, by `plain_name`
    keys: dict[str, list[str]]  # dotted names of the options of each study
    broken: dict[str, str]  # errors of extensions that cannot be loaded, by name


def load_index() -> Index:
    """Return the index from the cache, or a new one if the code has changed."""
    file, stamp = cache_folder() / FILE, code_stamp()
    with suppress(OSError, ValueError):
        kept = json.loads(file.read_text(encoding="utf-8"))
        if kept["stamp"] == stamp:
            return kept
    from hyperpush.cli.explain import describe_all  # not at the top, because it imports JAX

    made = describe_all(stamp)
    if made["broken"]:  # not cached: a broken extension may work the next time although no file has changed
        return made
    with suppress(OSError):  # if the cache cannot be written, the next call only takes longer
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, json.dumps(made), durable=False)
    return made


def code_stamp() -> str:
    """Return a digest of the entry points, and of the names, times and sizes of all code files."""
    own = sorted(Path(hyperpush.__file__).parent.rglob("*.py"))
    files = [(str(file), (found := file.stat()).st_mtime_ns, found.st_size) for file in (*own, *extension_files())]
    points = [(each.name, each.value, distribution(each)) for group in GROUPS for each in extensions(group).values()]
    return hashlib.sha256(repr((files, points)).encode()).hexdigest()
