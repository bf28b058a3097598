"""Format tables for the terminal."""

from collections.abc import Iterable, Sequence
from typing import Any

from rich.table import Table


def cell(value: object) -> str:
    """Return one value as text: floats to four digits, None as a dash."""
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> Table:
    """Return a Rich table; columns that hold only numbers are aligned to the right."""
    rows = list(rows)
    made = Table(title=title, title_justify="left", title_style="bold")
    for place, column in enumerate(columns):
        numbers = all(row[place] is None or isinstance(row[place], (int, float)) for row in rows)
        made.add_column(column, justify="right" if numbers and rows else "left", overflow="fold")
    for row in rows:
        # Rich would read square brackets in a cell as markup.
        made.add_row(*(cell(value).replace("[", r"\[") for value in row))
    return made
