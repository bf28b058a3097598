"""Print the output of commands on stdout, and end with exit codes for failed results."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console

from hyperpush.base.status import is_growing
from hyperpush.runs.events import to_json
from hyperpush.runs.tables import table

NOT_CONVERGED = 3  # exit code of a result that did not converge, is not stationary, or grows without bound


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Print a table that is as wide as the terminal, or 200 columns wide if stdout is not a terminal."""
    names = [name.replace("_", " ") for name in columns]
    Console(width=None if sys.stdout.isatty() else 200).print(table(title, names, rows))


def print_json(result: Mapping[str, Any], asked: bool = True) -> None:
    """Print a result as one JSON object if `asked` is True."""
    if asked:
        print(to_json(result))


def holds_failure(result: Any, field: str = "converged") -> bool:
    """Return True if the field is False anywhere in a result, such as in the status of one of its parts."""
    if isinstance(result, Mapping):
        return result.get(field) is False or any(holds_failure(each, field) for each in result.values())
    return isinstance(result, list | tuple) and any(holds_failure(each, field) for each in result)


def refuse_growth(result: Mapping[str, Any]) -> None:
    """End the process with exit code 3 if the params or hypers of a result grow without bound."""
    if is_growing(result):
        print("error: params or hypers are growing: see the status in result.json", file=sys.stderr)
        sys.exit(NOT_CONVERGED)


def refuse_failure(result: Mapping[str, Any], strict: bool, stationary: bool = False) -> None:
    """End the process with exit code 3 if a result did not converge (`strict`) or is not stationary (`stationary`)."""
    option = "--strict-stationary" if stationary else "--strict"
    if (strict or stationary) and holds_failure(result):
        print(f"not converged ({option})", file=sys.stderr)
        sys.exit(NOT_CONVERGED)
    if stationary and holds_failure(result, "stationary"):
        print(f"not stationary ({option})", file=sys.stderr)
        sys.exit(NOT_CONVERGED)
