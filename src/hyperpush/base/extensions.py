"""Find extensions that installed distributions add by entry points. This module does not import JAX.

An extension is imported at its first use. A name in one of these groups stands for an object that some commands find:

- `hyperpush.methods`: a class of methods or networks, found by specs, `hyperpush list --methods` and `show`.
- `hyperpush.studies`: an `Experiment` of that name, found by `hyperpush run`, `list`, `show`, `resume` and `plan`.
- `hyperpush.commands`: a Typer app, found by `hyperpush NAME`.

Names of the library itself cannot be replaced. If two distributions add the same name, the alphabetically first
distribution wins.
"""

from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hyperpush.base.errors import HyperpushError

METHODS, STUDIES, COMMANDS = GROUPS = ("hyperpush.methods", "hyperpush.studies", "hyperpush.commands")
PAPERS = "in a clone of hyperpush, pip install . ./papers adds the papers' studies and commands"


def extensions(group: str) -> dict[str, EntryPoint]:
    """Return the entry points of a group by name."""
    found: dict[str, EntryPoint] = {}
    for point in sorted(entry_points(group=group), key=lambda each: (each.name, distribution(each))):
        found.setdefault(point.name, point)
    return found


def load_extension(point: EntryPoint, kind: type) -> Any:
    """Load the object of an entry point.

    Raises:
        HyperpushError: The module cannot be imported, or the object is not an instance of `kind`. The message names
            the distribution.
    """
    whose = f"{point.name} of {distribution(point)} ({point.group}, {point.value})"
    try:
        found = point.load()
    except Exception as error:  # modules of other distributions may raise anything
        raise HyperpushError(f"{whose} cannot be loaded: {type(error).__name__}: {error}") from error
    if not isinstance(found, kind):
        raise HyperpushError(f"{whose} cannot be used: it is of class {type(found).__name__}, not {kind.__name__}")
    return found


def distribution(point: EntryPoint) -> str:
    """Return the name and version of an entry point's distribution."""
    return f"{point.dist.name} {point.dist.version}" if point.dist else "an unknown distribution"


def extension_files() -> list[Path]:
    """Return the Python files of all packages with entry points, without importing the packages."""
    roots = {point.value.partition(":")[0].partition(".")[0] for group in GROUPS for point in entry_points(group=group)}
    files: list[Path] = []
    for root in sorted(roots):
        found = find_spec(root)
        for folder in (found and found.submodule_search_locations) or ():
            files += sorted(Path(folder).rglob("*.py"))
        if found and found.origin and not found.submodule_search_locations:
            files.append(Path(found.origin))
    return files


def has_papers() -> bool:
    """Return True if the package `hyperpush-papers` is installed."""
    return any(point.dist and point.dist.name == "hyperpush-papers" for point in entry_points(group=STUDIES))
