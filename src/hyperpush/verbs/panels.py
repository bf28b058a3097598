"""Panels: the pictures, tables and sentences of a result as plain numbers. Drawing is in `hyperpush.verbs.figures`."""

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
    """One part of a page or figure; the functions of this module make it.

    Attributes:
        title: The heading.
        kind: `"text"`, `"table"`, `"lines"`, `"bars"`, `"heat"`, `"shares"`, `"network"` or `"image"`.
        numbers: The content as data for JSON: lists, strings and finite numbers; None for missing numbers.
        note: A sentence below it.
    """

    title: str
    kind: Kind
    numbers: Mapping[str, Any]
    note: str = ""

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise unknown(f"panel {self.title!r}.kind", self.kind, get_args(Kind))

    def to_dict(self) -> dict[str, Any]:
        """Return the panel as data for JSON."""
        return asdict(self)


class Pictured:
    """Base of objects that can be drawn and put on a page: define `panels()`."""

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
    """Import and return the module that draws; name the extra if matplotlib is missing."""
    require("matplotlib", EXTRA)
    from hyperpush.verbs import figures

    return figures


def text(title: str, *sentences: str, tone: Literal["good", "bad", "plain"] = "plain", note: str = "") -> Panel:
    """Sentences, one paragraph each; pages color them by their tone."""
    return Panel(title, "text", {"sentences": list(sentences), "tone": tone}, note)


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], *, note: str = "") -> Panel:
    """Rows under named columns."""
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
    """A line per series over shared positions, with a band from `low` to `high` for the series named there."""
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
    """A group of bars per label, one bar per series, with intervals for the series named in `low` and `high`.

    Args:
        title: The heading.
        labels: Names of the groups, such as parties.
        series: By name, one value per label. None or NaN leaves a gap.
        low: By name of a series, the lower ends of its intervals.
        high: By name of a series, the upper ends.
        marks: A word per label that colors the bars of a single series, such as a verdict; None: one color per series.
        y_label: The unit of the values.
        note: A sentence below.
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
    """A table of numbers as colors, [rows, columns]; values of both signs are colored around 0.

    `marks` are texts in the cells; without them small tables show their numbers. None or NaN leaves a cell empty.
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
    """A stacked bar per label, split by parts; each bar is divided by its sum. `counts` stand beside the labels."""
    found = {"labels": [str(each) for each in labels], "parts": _series(title, parts, labels)}
    if counts is not None:
        _check_length(title, counts, labels)
    return Panel(title, "shares", {**found, "counts": None if counts is None else plain(counts)}, note)


def network(title: str, names: Sequence[str], links: Sequence[tuple[int, int, float]], *, directed: bool) -> Panel:
    """Clients on a circle and the links among them: (sender, receiver, share of the time that the link is up)."""
    found = {"names": [str(each) for each in names], "links": plain(links), "directed": directed}
    up = [each[2] for each in links]
    note = f"{len(names)} clients, {len(links)} {'one-way' if directed else 'two-way'} links"
    if up and min(up) < 1:
        note += f", each up {100 * min(up):.0f} to {100 * max(up):.0f} % of the time"
    return Panel(title, "network", found, note + ".")


def image(title: str, path: Path, *, note: str = "") -> Panel:
    """A PNG file, placed in the page."""
    return Panel(title, "image", {"path": str(path)}, note)


def plain(value: Any) -> Any:
    """Return numbers, arrays and sequences as data for JSON: lists, with None for numbers that are not finite."""
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
