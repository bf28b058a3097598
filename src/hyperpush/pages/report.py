"""Write the panels of a result as one self-contained HTML page, and the same numbers as JSON beside it: `hp.report`."""

import base64
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hyperpush.base.checks import require
from hyperpush.base.errors import InvalidInput
from hyperpush.base.files import write_together
from hyperpush.base.panels import DRAWN, EXTRA, Panel, drawing
from hyperpush.base.version import __version__

FORMAT = 1  # format version of the JSON file
TEMPLATE = Path(__file__).with_name("page.html.j2")


def report(
    result: Any, path: str | Path, overwrite: bool = False, *, title: str | None = None, about: Sequence[str] = ()
) -> Path:
    """Write a result as one HTML page, and its numbers as JSON beside it.

    The page shows the result's `panels()`: status in words, costs, pictures and tables. It needs no script and no
    network, so it can be mailed or printed. Each picture has its numbers in a table below it.

    Args:
        result: The result of any verb, `hp.load(folder)`, or an object with `panels()`.
        path: Path of the page, which ends in `.html`. The JSON file has the same name with `.json`.
        overwrite: True replaces existing files. False raises InvalidInput if a file exists.
        title: The heading; None takes the name of the result's class.
        about: Sentences under the heading.

    Returns:
        The page's path.

    Raises:
        InvalidInput: The object lacks panels, a file exists or cannot be written, or the extra `pages` is missing.
            No file is written partially.

    Example:
        >>> import tempfile
        >>> import hyperpush as hp
        >>> task, network = hp.tasks.quadratic(3, seed=0), hp.networks.Ring(3)
        >>> trained = hp.train(task, hp.SGP(steps=10, step_size=0.1), network, key=0)
        >>> page = hp.report(trained, tempfile.mkdtemp() + "/trained.html")
        >>> page.name, page.with_suffix(".json").is_file()
        ('trained.html', True)
    """
    page = check_path(path, overwrite)
    if not callable(getattr(result, "panels", None)) or isinstance(result, type):
        raise InvalidInput("result", type(result).__name__, "a result of a verb, or hp.load(folder)")
    shown, title = result.panels(), title or type(result).__name__
    files = {page: to_html(shown, title, about), page.with_suffix(".json"): to_json(shown, title, about)}
    try:
        write_together(files)
    except OSError as error:
        raise InvalidInput("path", str(page), f"a file that can be written ({error.strerror})") from None
    return page


def check_path(path: Any, overwrite: bool = False) -> Path:
    """Return the path of the page to write; raise InvalidInput if writing would fail after the page is made.

    Reasons are the file name, a missing or read-only folder, existing files, and a missing extra.
    """
    if not isinstance(path, str | Path) or Path(path).suffix not in (".html", ".htm"):
        raise InvalidInput("path", str(path), "a file name that ends in .html")
    page = Path(path)
    if not page.parent.is_dir():
        raise InvalidInput("path", str(path), "a file in a folder that exists")
    for file in (page, page.with_suffix(".json")):
        if file.is_dir() or (file.exists() and not overwrite):
            raise InvalidInput("path", str(file), "a new file; overwrite=True (--overwrite) replaces an existing one")
    try:
        with tempfile.TemporaryFile(dir=page.parent):
            pass
    except OSError as error:
        raise InvalidInput("path", str(path), f"a file in a folder to write to ({error.strerror})") from None
    require("jinja2", EXTRA)
    drawing()
    return page


def to_json(shown: Sequence[Panel], title: str, about: Sequence[str] = ()) -> str:
    """Return the panels as JSON: title, sentences, and each panel's title, kind, numbers and note."""
    head = {"format": FORMAT, "version": __version__, "title": title, "about": list(about)}
    return json.dumps({**head, "panels": [panel.to_dict() for panel in shown]}, indent=1, allow_nan=False) + "\n"


def to_html(shown: Sequence[Panel], title: str, about: Sequence[str] = ()) -> str:
    """Return the panels as one HTML page."""
    jinja = require("jinja2", EXTRA)
    environment = jinja.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja.StrictUndefined
    )
    environment.filters["cell"] = cell
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    parts = [_part(panel, number) for number, panel in enumerate(shown)]
    return template.render(title=title, about=about, parts=parts, version=__version__)


def cell(value: Any) -> str:
    """Return a value for a table: whole numbers with separators, others to four digits, a dash for missing ones."""
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _part(panel: Panel, number: int) -> dict[str, Any]:
    """Return the data of one panel that the HTML template reads."""
    part: dict[str, Any] = {"title": panel.title, "kind": panel.kind, "note": panel.note, "numbers": panel.numbers}
    if panel.kind in DRAWN:
        part["svg"] = drawing().svg(panel, f"p{number}-")
        part["columns"], part["rows"] = as_table(panel)
    if panel.kind == "table":
        part["columns"], part["rows"] = panel.numbers["columns"], panel.numbers["rows"]
    if panel.kind == "image":
        part["data"] = base64.b64encode(Path(panel.numbers["path"]).read_bytes()).decode()
    return part


def as_table(panel: Panel) -> tuple[list[str], list[list[Any]]]:
    """Return the numbers of a picture as a table: its column names and its rows."""
    numbers = panel.numbers
    if panel.kind == "heat":
        rows = zip(numbers["rows"], numbers["values"], strict=True)
        return ["", *numbers["columns"]], [[name, *row] for name, row in rows]
    if panel.kind == "network":
        names = numbers["names"]
        ends = ["from", "to"] if numbers["directed"] else ["one end", "other end"]
        return [*ends, "share of time up"], [[names[i], names[j], up] for i, j, up in numbers["links"]]
    first = numbers["x"] if panel.kind == "lines" else numbers["labels"]
    columns = {numbers.get("x_label", ""): first}
    for name, values in numbers.get("series", numbers.get("parts", {})).items():
        columns[name or "value"] = values
        for end in ("low", "high"):
            if name in numbers.get(end, {}):
                columns[f"{name} {end}".strip()] = numbers[end][name]
    if numbers.get("marks"):
        columns["verdict"] = numbers["marks"]
    if numbers.get("counts"):
        columns["count"] = numbers["counts"]
    return list(columns), [list(row) for row in zip(*columns.values(), strict=True)]
