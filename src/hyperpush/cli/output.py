"""What commands print on stdout, and whether it tells of a failure."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console

from hyperpush.runs.events import to_json
from hyperpush.runs.report.tables import table
from hyperpush.studies.papers import find, papers


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """A table, as wide as the terminal."""
    # A pipe has no width to fit into.
    names = [name.replace("_", " ") for name in columns]
    Console(width=None if sys.stdout.isatty() else 200).print(table(title, names, rows))


def print_json(result: Mapping[str, Any], asked: bool = True) -> None:
    """One JSON object, if it was asked for."""
    if asked:
        print(to_json(result))


def holds_failure(result: Any) -> bool:
    """Whether a status anywhere in a result says that something did not converge."""
    if isinstance(result, Mapping):
        return result.get("converged") is False or any(map(holds_failure, result.values()))
    return isinstance(result, list | tuple) and any(map(holds_failure, result))


def print_papers(name: str | None) -> None:
    """All figures, tables and theorems of the papers, or those of a name with their commands and numbers."""
    if name is None:
        for paper in papers().values():
            rows = [(item.name, item.what, item.runs or f"not reproduced: {item.missing}") for item in paper.items]
            print_table(paper.heading, ("name", "what", "runs"), rows)
        return
    for item in find(name):
        print(f"{item.name}: {item.what}", papers()[item.name[0]].heading, sep="\n")
        for command in item.commands:
            print("   ", command)
        if grid := item.grid():
            print_table("", [cell or "" for cell in grid[0]], grid[1:])
        print(*item.sentences("docs/results/{}.md"), "", sep="\n")
