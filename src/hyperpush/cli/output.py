"""What commands print on stdout, and whether it tells of a failure."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console

from hyperpush.runs.events import to_json
from hyperpush.runs.tables import table

NOT_CONVERGED = 3  # exit code


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


def refuse_growth(result: Mapping[str, Any]) -> None:
    """End with the exit code of a divergence if the params of a result are growing."""
    status = result.get("status")
    if isinstance(status, Mapping) and status.get("reason") == "growing":
        print("error: params or hypers are growing: see the status in result.json", file=sys.stderr)
        sys.exit(NOT_CONVERGED)


def refuse_failure(result: Mapping[str, Any], strict: bool) -> None:
    """End with the exit code of what did not converge, if that was asked for."""
    if strict and holds_failure(result):
        print("not converged (--strict)", file=sys.stderr)
        sys.exit(NOT_CONVERGED)
