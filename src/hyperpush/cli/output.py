"""Output of commands on stdout, and exit codes for failed results."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console

from hyperpush.base.status import is_growing
from hyperpush.runs.events import to_json
from hyperpush.runs.tables import table

NOT_CONVERGED = 3  # exit code


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Print a table, as wide as the terminal."""
    # A pipe is without a width limit.
    names = [name.replace("_", " ") for name in columns]
    Console(width=None if sys.stdout.isatty() else 200).print(table(title, names, rows))


def print_json(result: Mapping[str, Any], asked: bool = True) -> None:
    """Print one JSON object if requested."""
    if asked:
        print(to_json(result))


def holds_failure(result: Any, field: str = "converged") -> bool:
    """True if this field is False in any status of a result."""
    if isinstance(result, Mapping):
        return result.get(field) is False or any(holds_failure(each, field) for each in result.values())
    return isinstance(result, list | tuple) and any(holds_failure(each, field) for each in result)


def refuse_growth(result: Mapping[str, Any]) -> None:
    """End with the exit code of a divergence if the params of a result are growing."""
    if is_growing(result):
        print("error: params or hypers are growing: see the status in result.json", file=sys.stderr)
        sys.exit(NOT_CONVERGED)


def refuse_failure(result: Mapping[str, Any], strict: bool, stationary: bool = False) -> None:
    """End with exit code 3 if a result did not converge or is not stationary, as requested by the options."""
    option = "--strict-stationary" if stationary else "--strict"
    if (strict or stationary) and holds_failure(result):
        print(f"not converged ({option})", file=sys.stderr)
        sys.exit(NOT_CONVERGED)
    if stationary and holds_failure(result, "stationary"):
        print(f"not stationary ({option})", file=sys.stderr)
        sys.exit(NOT_CONVERGED)
