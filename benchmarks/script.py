"""A benchmark as a script: a frozen dataclass of options, read from the command line; tables on stderr, or JSON."""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import field, fields
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console

from hyperpush.base.errors import HyperpushError
from hyperpush.runs.events import to_json
from hyperpush.runs.tables import table

T = TypeVar("T")
Row = dict[str, Any]


def option(default: Any, text: str, least: float | None = None, choices: tuple[str, ...] | None = None) -> Any:
    """Return a field of the options: its default, a line of help, its least value, or its allowed names."""
    return field(default=default, metadata={"help": text, "least": least, "choices": choices})


def read(options: type[T], arguments: Sequence[str] | None = None) -> tuple[T, bool]:
    """Return the options of a command line, and True if it requests JSON; exit with code 2 if they are invalid."""
    parser = argparse.ArgumentParser(
        description=options.__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    for each in fields(options):  # type: ignore[arg-type]
        told, first = each.metadata, each.default[0] if isinstance(each.default, tuple) else each.default
        kind: dict[str, Any] = {"type": type(first), "choices": told["choices"]}
        kind |= {"nargs": "*"} if first is not each.default else {}
        kind = {"action": argparse.BooleanOptionalAction} if first is True else kind
        parser.add_argument(f"--{each.name.replace('_', '-')}", default=each.default, help=told["help"], **kind)
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    given = vars(parser.parse_args(arguments))
    for each in fields(options):  # type: ignore[arg-type]
        least, value = each.metadata["least"], given[each.name]
        if least is not None and any(
            not one >= least for one in (value if isinstance(value, list | tuple) else [value])
        ):
            parser.error(f"{each.name}: got {value}; allowed: at least {least:g}")
    as_json = given.pop("json")
    return options(**given), as_json


def main(options: type[T], run: Callable[[T], Row], arguments: Sequence[str] | None = None) -> None:
    """Run a benchmark with the options of the command line."""
    asked, as_json = read(options, arguments)
    try:
        result = run(asked)
    except HyperpushError as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        sys.exit(2)
    if as_json:
        print(to_json(result))


def resume(
    file: str, cells: Iterable[Row], measure: Callable[[Row], Row], seconds: float = float("inf")
) -> tuple[list[Row], int]:
    """Measure the cells that a file of JSON lines lacks, and append a line for each.

    Returns:
        The rows of all these cells, with the commit and CPU seconds; and how many are left, as no cell starts after
        `seconds` of CPU time.
    """
    path, started = Path(file), time.process_time()
    lines = path.read_text("utf-8").splitlines() if path.exists() else []
    done = {_name(row["cell"]): row for row in map(json.loads, lines)}
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    rows: list[Row] = []
    left = 0
    for cell in cells:
        before = time.process_time()
        if _name(cell) not in done:
            if before - started > seconds:
                left += 1
                continue
            found = rounded(measure(cell))
            spent = round(time.process_time() - before, 2)
            done[_name(cell)] = {"cell": cell, **found, "cpu_seconds": spent, "commit": commit}
            with path.open("a", encoding="utf-8") as out:
                out.write(json.dumps(done[_name(cell)], separators=(",", ":")) + "\n")
        rows.append(done[_name(cell)])
    return rows, left


def rounded(found: Any) -> Any:
    """Return JSON data with floats of four digits, which keep files small."""
    if isinstance(found, dict):
        return {name: rounded(each) for name, each in found.items()}
    if isinstance(found, list | tuple):
        return [rounded(each) for each in found]
    return float(f"{found:.4g}") if isinstance(found, float) else found


def _name(cell: Row) -> str:
    return json.dumps(cell, sort_keys=True)


def show(title: str, columns: Any, rows: Any) -> None:
    """Print a table on stderr."""
    Console(stderr=True, width=None if sys.stderr.isatty() else 200).print(table(title, columns, rows))
