"""What `list`, `show` and shell completion print, kept as JSON so that they need not import JAX.

The index is made by importing everything once, on first use, and kept in the user's cache folder. It is made anew when
a file of the package has changed, or one of the packages that add to it by entry points.
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
    """What has a name."""

    stamp: str  # of the code that it was made from
    studies: Rows  # name, summary
    networks: Rows  # name, class, summary
    methods: Mapping[str, Rows]  # by title; the columns are those of `COLUMNS`
    names: list[str]  # of everything below
    options: dict[str, str]  # TOML by plain name
    keys: dict[str, list[str]]  # of the options of each study, dotted
    broken: dict[str, str]  # why what another distribution adds cannot be had, by name


def load_index() -> Index:
    """The index from the cache, or a new one if the code has changed."""
    file, stamp = cache_folder() / FILE, code_stamp()
    with suppress(OSError, ValueError):
        kept = json.loads(file.read_text(encoding="utf-8"))
        if kept["stamp"] == stamp:
            return kept
    from hyperpush.cli.explain import describe_all  # here: it imports JAX

    made = describe_all(stamp)
    if made["broken"]:  # it may be whole the next time, though no file has changed
        return made
    with suppress(OSError):  # a cache that cannot be written costs time, nothing else
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, json.dumps(made), durable=False)
    return made


def code_stamp() -> str:
    """A digest of the files of all packages that have names, by time and size, and of the entry points."""
    own = sorted(Path(hyperpush.__file__).parent.rglob("*.py"))
    files = [(str(file), (found := file.stat()).st_mtime_ns, found.st_size) for file in (*own, *extension_files())]
    points = [(each.name, each.value, distribution(each)) for group in GROUPS for each in extensions(group).values()]
    return hashlib.sha256(repr((files, points)).encode()).hexdigest()
