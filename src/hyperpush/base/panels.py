"""Panels hold the pictures, tables and sentences of a result as plain data; `hyperpush.base.figures` draws them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from hyperpush.base.checks import require
from hyperpush.base.errors import InvalidInput, unknown

Kind = Literal["text", "table", "lines", "bars", "heat", "shares", "network", "image"]
DRAWN = ("lines", "bars", "heat", "shares", "network")
EXTRA = "pages"  # installs matplotlib and Jinja2
Values = Sequence[Any] | np.ndarray


@dataclass(frozen=True)
class Panel:
    """One part of a report page or figure: a picture, a table or sentences. The functions of this module make panels.

    Attributes:
        title: The heading.
        kind: `"text"`, `"table"`, `"lines"`, `"bars"`, `"heat"`, `"shares"`, `"network"` or `"image"`.
        numbers: The content in a form that JSON can store: lists, strings and finite numbers; None for missing numbers.
        note: A sentence below the content; an empty string for none.
    """

    title: str
    kind: Kind
    numbers: Mapping[str, Any]
    note: str = ""

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise unknown(f"panel {self.title!r}.kind", self.kind, get_args(Kind))

    def to_dict(self) -> dict[str, Any]:
        """Return the panel as a dictionary that JSON can store."""
        return asdict(self)


class Pictured:
    """Base class of objects that can be drawn or put on a report page; subclasses define `panels()`."""

    def panels(self) -> list[Panel]:
        """Return the result's pictures, tables and sentences, each with a title, a kind and its numbers.

        `hp.report` places them on a page; `plot()` draws the pictures.
        """
        raise NotImplementedError

    def plot(self) -> Any:
        """Draw the pictures among `panels()` with matplotlib, in one figure.

        Returns:
            A matplotlib figure. Notebooks show it; `figure.savefig("picture.png")` writes it.

        Raises:
            InvalidInput: The extra `pages` is not installed, or the result lacks pictures.
        """
        return drawing().draw(self.panels())


def drawing() -> Any:
    """Import and return `hyperpush.base.figures`; if matplotlib is missing, the error names the extra to install."""
    require("matplotlib", EXTRA)
    from hyperpush.base import figures

    return figures


def text(title: str, *sentences: str, tone: Literal["good", "bad", "plain"] = "plain", note: str = "") -> Panel:
    """Return a panel of sentences, one paragraph each, which pages color by `tone`."""
    return Panel(title, "text", {"sentences": list(sentences), "tone": tone}, note)


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], *, note: str = "") -> Panel:
    """Return a panel with a table: rows of values under named columns."""
    made = [[plain(value) for value in row] for row in rows]
    for row in made:
        _check_length(title, row, columns)
    return Panel(title, "table", {"columns": list(columns), "rows": made}, note)


def lines(
    title: str,
    x: Values,
    series: Mapping[str, Values],
    *,
    low: Mapping[str, Values] | None = None,
    high: Mapping[str, Values] | None = None,
    x_label: str = "step",
    y_label: str = "",
    log: bool = False,
    note: str = "",
) -> Panel:
    """Return a panel with one line per series over shared positions `x`.

    Series named in `low` and `high` also get a band between these values.
    """
    found = {"x": plain(x), "series": _series(title, series, x), "low": _series(title, low, x)}
    found |= {"high": _series(title, high, x), "x_label": x_label, "y_label": y_label, "log": log}
    return Panel(title, "lines", found, note)


def bars(
    title: str,
    labels: Sequence[str],
    series: Mapping[str, Values],
    *,
    low: Mapping[str, Values] | None = None,
    high: Mapping[str, Values] | None = None,
    marks: Sequence[str] | None = None,
    y_label: str = "",
    note: str = "",
) -> Panel:
    """Return a panel with one group of bars per label, and in each group one bar per series.

    Args:
        title: The heading.
        labels: Names of the groups, such as parties.
        series: For each series, its values, one per label. None or NaN leaves a gap.
        low: For each series with intervals, the lower ends of these intervals. None if there are none.
        high: For each series with intervals, the upper ends of these intervals.
        marks: One word per label, such as a verdict, that colors the bars of a single series. None gives each series
            its own color.
        y_label: Label of the vertical axis, such as the unit of the values.
        note: A sentence below the bars.
    """
    if marks is not None and len(series) != 1:
        raise InvalidInput(f"panel {title!r}.marks", f"{len(series)} series", "one series where marks color the bars")
    found = {"labels": [str(each) for each in labels], "series": _series(title, series, labels)}
    found |= {"low": _series(title, low, labels), "high": _series(title, high, labels), "y_label": y_label}
    if marks is not None:
        _check_length(title, marks, labels)
    return Panel(title, "bars", {**found, "marks": None if marks is None else list(marks)}, note)


def heat(
    title: str,
    rows: Sequence[str],
    columns: Sequence[str],
    values: Sequence[Values] | np.ndarray,
    *,
    row_label: str = "",
    column_label: str = "",
    label: str = "",
    marks: Sequence[Sequence[str]] | None = None,
    note: str = "",
) -> Panel:
    """Return a panel with a heat map: the numbers of a table [rows, columns] as colors.

    If values of both signs occur, the color scale is symmetric around 0. `marks` are texts in the cells; without marks,
    small heat maps show their numbers. None or NaN leaves a cell empty.
    """
    made = [plain(row) for row in values]
    _check_length(title, made, rows)
    for row in [*made, *(marks or [])]:
        _check_length(title, row, columns)
    found = {"rows": [str(each) for each in rows], "columns": [str(each) for each in columns], "values": made}
    found |= {"row_label": row_label, "column_label": column_label, "label": label}
    return Panel(title, "heat", {**found, "marks": None if marks is None else [list(row) for row in marks]}, note)


def shares(
    title: str,
    labels: Sequence[str],
    parts: Mapping[str, Values],
    *,
    counts: Sequence[int] | None = None,
    note: str = "",
) -> Panel:
    """Return a panel with one stacked bar per label, which shows the share of each part in percent.

    `counts` are shown in parentheses beside the labels; None shows none.
    """
    found = {"labels": [str(each) for each in labels], "parts": _series(title, parts, labels)}
    if counts is not None:
        _check_length(title, counts, labels)
    return Panel(title, "shares", {**found, "counts": None if counts is None else plain(counts)}, note)


def network(title: str, names: Sequence[str], links: Sequence[tuple[int, int, float]], *, directed: bool) -> Panel:
    """Return a panel that draws clients on a circle and the links among them.

    Each link is a tuple (sender, receiver, share of the time that the link is up).
    """
    found = {"names": [str(each) for each in names], "links": plain(links), "directed": directed}
    up = [each[2] for each in links]
    note = f"{len(names)} clients, {len(links)} {'one-way' if directed else 'two-way'} links"
    if up and min(up) < 1:
        note += f", each up {100 * min(up):.0f} to {100 * max(up):.0f} % of the time"
    return Panel(title, "network", found, note + ".")


def image(title: str, path: Path, *, note: str = "") -> Panel:
    """Return a panel that places a PNG file in the page."""
    return Panel(title, "image", {"path": str(path)}, note)


def plain(value: Any) -> Any:
    """Return numbers, arrays and sequences in a form that JSON can store: lists, with None for non-finite numbers."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _series(title: str, series: Mapping[str, Values] | None, labels: Values) -> dict[str, list[Any]]:
    found = {name: plain(values) for name, values in (series or {}).items()}
    for values in found.values():
        _check_length(title, values, labels)
    return found


def _check_length(title: str, values: Any, labels: Any) -> None:
    if len(values) != len(labels):
        raise InvalidInput(f"panel {title!r}", f"{len(values)} values", f"{len(labels)}, one for each label")
