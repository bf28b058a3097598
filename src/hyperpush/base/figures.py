"""Draw panels and curves with matplotlib in one style. Without pyplot, no display or global state is needed."""

import html
import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch
from matplotlib.ticker import MaxNLocator

from hyperpush.base.errors import InvalidInput
from hyperpush.base.panels import DRAWN, Panel

# Colors of Okabe and Ito, which color-blind readers tell apart: blue, vermilion, green, orange, purple, sky, yellow.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#E69F00", "#CC79A7", "#56B4E9", "#F0E442")
GRAY = "#9a9a9a"
MARKED = {"helps": COLORS[2], "hurts": COLORS[1], "cannot say": GRAY, "yes": COLORS[2], "no": COLORS[1]}
STYLE: Any = {
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.prop_cycle": cycler(color=COLORS),
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": "medium",
    "figure.dpi": 150,
    "font.size": 9,
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "lines.linewidth": 1.4,
    "svg.hashsalt": "hyperpush",
}
WIDTH, HEIGHT = 4.8, 3.2  # size of one panel in inches
LARGE_HEAT = 12  # a heat map with at most this many rows and columns shows its numbers
LARGE_NETWORK = 600  # a directed network with at most this many links shows each link as an arrow
NAMED_CLIENTS = 40  # a drawing of a network with at most this many clients shows their names


class Picture(Figure):
    """A matplotlib figure that notebooks display as an image."""

    def _repr_png_(self) -> bytes:
        file = io.BytesIO()
        self.savefig(file, format="png")
        return file.getvalue()


@dataclass(frozen=True)
class Curve:
    """A labeled line: positions x, means, and optionally a standard deviation (`spread`) around each mean."""

    label: str
    x: Any
    mean: Any
    spread: Any = None


@matplotlib.rc_context(STYLE)
def panels(columns: int = 1) -> tuple[Figure, list[Axes]]:
    """Return a new figure with `columns` empty axes side by side, and the list of these axes."""
    figure = Picture(figsize=(4.2 * columns, HEIGHT), layout="constrained")
    return figure, list(figure.subplots(1, columns, squeeze=False)[0])


@matplotlib.rc_context(STYLE)
def draw(shown: Sequence[Panel], columns: int = 2) -> Picture:
    """Return one figure of all panels that are pictures, `columns` side by side; texts and tables are left out."""
    drawn = [panel for panel in shown if panel.kind in DRAWN]
    if not drawn:
        raise InvalidInput("plot", "a result without pictures", "one that has some; `panels()` has its tables")
    columns = min(columns, len(drawn))
    rows = -(-len(drawn) // columns)
    heights = [max(_size(panel)[1] for panel in drawn[row * columns : (row + 1) * columns]) for row in range(rows)]
    figure = Picture(figsize=(WIDTH * columns, sum(heights)), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, height_ratios=heights).ravel()
    for panel, place in zip(drawn, axes, strict=False):
        draw_panel(place, panel)
    for place in axes[len(drawn) :]:
        place.set_axis_off()
    return figure


@matplotlib.rc_context(STYLE)
def svg(panel: Panel, prefix: str) -> str:
    """Return one panel as an SVG element for a page, without its title. All ids in the SVG begin with `prefix`."""
    figure = Picture(figsize=_size(panel), layout="constrained")
    draw_panel(figure.subplots(), panel, titled=False)
    file = io.StringIO()
    figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None}, transparent=True)
    found = file.getvalue()
    found = found[found.index("<svg") :]
    found = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{prefix}", found)
    head, _, rest = found.partition(">")
    wide = float(re.search(r'viewBox="\S+ \S+ (\S+)', head)[1])  # pyright: ignore[reportOptionalSubscript]
    head = re.sub(r' (width|height)="[^"]*"', "", head)
    return f'{head} role="img" aria-label="{html.escape(panel.title)}" style="width:100%;max-width:{wide:.0f}pt">{rest}'


@matplotlib.rc_context(STYLE)
def draw_panel(axes: Axes, panel: Panel, titled: bool = True) -> None:
    """Draw one panel into the given axes."""
    drawers: Mapping[str, Callable[[Axes, Mapping[str, Any]], None]] = {
        "lines": _draw_lines,
        "bars": _draw_bars,
        "heat": _draw_heat,
        "shares": _draw_shares,
        "network": _draw_network,
    }
    drawers[panel.kind](axes, panel.numbers)
    if titled:
        axes.set_title(panel.title, loc="left")


def _size(panel: Panel) -> tuple[float, float]:
    """Return the width and height of a panel in inches: taller with many rows, wider with many bars."""
    if panel.kind == "heat":
        return WIDTH + 1, min(9.0, max(HEIGHT, 1.2 + 0.3 * len(panel.numbers["rows"])))
    if panel.kind == "shares":
        return WIDTH + 1, min(9.0, max(HEIGHT - 0.6, 1 + 0.28 * len(panel.numbers["labels"])))
    if panel.kind == "network":
        return WIDTH, WIDTH - 0.6
    if panel.kind == "bars":
        return min(10.0, max(WIDTH + 1, 0.22 * len(panel.numbers["labels"]) * len(panel.numbers["series"]))), HEIGHT
    return WIDTH + 1, HEIGHT


def _floats(values: Any) -> np.ndarray:
    return np.array(values, float)  # None becomes NaN


def _draw_lines(axes: Axes, numbers: Mapping[str, Any]) -> None:
    x = _floats(numbers["x"])
    for name, values in numbers["series"].items():
        (line,) = axes.plot(x, _floats(values), label=name, marker="." if len(x) == 1 else "")
        if name in numbers["low"]:
            low, high = _floats(numbers["low"][name]), _floats(numbers["high"][name])
            axes.fill_between(x, low, high, color=line.get_color(), alpha=0.2, linewidth=0)
    if numbers["log"]:
        axes.set_yscale("log")
    axes.set(xlabel=numbers["x_label"], ylabel=numbers["y_label"])
    axes.xaxis.set_major_locator(MaxNLocator(integer=bool(np.all(x == np.round(x))), nbins=8))
    _legend(axes, numbers["series"])


def _draw_bars(axes: Axes, numbers: Mapping[str, Any]) -> None:
    places, count = np.arange(len(numbers["labels"])), len(numbers["series"])
    width = 0.8 / max(count, 1)
    for number, (name, values) in enumerate(numbers["series"].items()):
        at, heights = places + (number - (count - 1) / 2) * width, _floats(values)
        color: Any = COLORS[number % len(COLORS)]
        if numbers["marks"] is not None:
            words = list(dict.fromkeys(numbers["marks"]))
            by_word = {word: MARKED.get(word, COLORS[place % len(COLORS)]) for place, word in enumerate(words)}
            color = [by_word[word] for word in numbers["marks"]]
            for word in words:
                axes.bar(0, 0, width=0, color=by_word[word], label=word)
        axes.bar(at, heights, width, color=color, label=name if numbers["marks"] is None else "_")
        if name in numbers["low"]:
            _draw_intervals(axes, at, numbers["low"][name], numbers["high"][name])
    axes.axhline(0, color="black", linewidth=0.6)
    axes.grid(visible=False, axis="x")
    axes.set_ylabel(numbers["y_label"])
    _label_axis(axes.xaxis, numbers["labels"], turned=True)
    if numbers["marks"] is not None:
        axes.legend()
    else:
        _legend(axes, numbers["series"])


def _draw_intervals(axes: Axes, at: np.ndarray, low: Any, high: Any) -> None:
    low, high = _floats(low), _floats(high)
    middle = (low + high) / 2
    axes.errorbar(at, middle, yerr=(high - low) / 2, fmt="none", ecolor="black", elinewidth=0.9, capsize=2)


def _draw_heat(axes: Axes, numbers: Mapping[str, Any]) -> None:
    values = _floats(numbers["values"])
    known = values[np.isfinite(values)]
    both = known.size > 0 and known.min() < 0 < known.max()
    largest = np.abs(known).max() if known.size else 1.0
    options: Any = {"cmap": "PuOr_r", "vmin": -largest, "vmax": largest} if both else {"cmap": "viridis"}
    drawn = axes.imshow(values, aspect="auto", interpolation="nearest", **options)
    axes.grid(visible=False)
    axes.set(xlabel=numbers["column_label"], ylabel=numbers["row_label"])
    _label_axis(axes.xaxis, numbers["columns"], turned=True)
    _label_axis(axes.yaxis, numbers["rows"])
    axes.get_figure().colorbar(drawn, ax=axes, label=numbers["label"])  # pyright: ignore[reportOptionalMemberAccess]
    if max(values.shape) <= LARGE_HEAT:
        _write_cells(axes, values, numbers["marks"], drawn)


def _write_cells(axes: Axes, values: np.ndarray, marks: Any, drawn: Any) -> None:
    for (row, column), value in np.ndenumerate(values):
        shown = marks[row][column] if marks is not None else f"{value:.2g}" if np.isfinite(value) else ""
        red, green, blue, _ = drawn.cmap(drawn.norm(value)) if np.isfinite(value) else (1, 1, 1, 1)
        dark = 0.299 * red + 0.587 * green + 0.114 * blue < 0.5  # perceived brightness (ITU-R BT.601)
        axes.text(column, row, shown, ha="center", va="center", fontsize=7, color="white" if dark else "black")


def _draw_shares(axes: Axes, numbers: Mapping[str, Any]) -> None:
    parts = {name: np.nan_to_num(_floats(values)) for name, values in numbers["parts"].items()}
    total = sum(parts.values(), np.zeros(len(numbers["labels"])))
    left, places = np.zeros(len(total)), np.arange(len(total))
    for number, (name, values) in enumerate(parts.items()):
        share = 100 * values / np.where(total > 0, total, 1)
        axes.barh(places, share, left=left, color=COLORS[number % len(COLORS)], label=name, height=0.75)
        left = left + share
    labels, counts = numbers["labels"], numbers["counts"]
    named = labels if counts is None else [f"{label} ({count:,})" for label, count in zip(labels, counts, strict=True)]
    axes.invert_yaxis()
    axes.set(xlabel="%", xlim=(0, 100))
    axes.grid(visible=False, axis="y")
    _label_axis(axes.yaxis, named)
    axes.legend(loc="upper left", bbox_to_anchor=(0, -0.1), ncols=min(len(parts), 4))  # beside the axis label


def _draw_network(axes: Axes, numbers: Mapping[str, Any]) -> None:
    names, links = numbers["names"], numbers["links"]
    angles = np.pi / 2 - 2 * np.pi * np.arange(len(names)) / max(len(names), 1)
    places = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    if numbers["directed"] and len(links) <= LARGE_NETWORK:
        for sender, receiver, up in links:
            style: Any = {"arrowstyle": "-|>", "mutation_scale": 8, "shrinkA": 7, "shrinkB": 7, "linewidth": 0.8}
            alpha = 0.25 + 0.65 * up
            curved = "arc3,rad=0.08"
            ends: Any = (places[sender], places[receiver])
            axes.add_patch(FancyArrowPatch(*ends, color=COLORS[0], alpha=alpha, connectionstyle=curved, **style))
    else:
        segments = [(places[sender], places[receiver]) for sender, receiver, _ in links]
        alphas = [0.25 + 0.65 * up for _, _, up in links]
        axes.add_collection(LineCollection(segments, colors=COLORS[0], alpha=alphas or None, linewidths=0.8))
    axes.scatter(*places.T, s=60 if len(names) <= NAMED_CLIENTS else 12, color=COLORS[1], zorder=3)
    if len(names) <= NAMED_CLIENTS:
        for name, (x, y) in zip(names, places, strict=True):
            side = "center" if abs(x) < 0.3 else "left" if x > 0 else "right"
            axes.text(1.1 * x, 1.12 * y, name, ha=side, va="center", fontsize=8)
    axes.set(xlim=(-1.5, 1.5), ylim=(-1.3, 1.3), aspect="equal")
    axes.set_axis_off()


def _label_axis(axis: Any, labels: Sequence[str], turned: bool = False) -> None:
    """Label the positions of an axis: all of them up to 40, otherwise at most 40 evenly spaced ones."""
    every = -(-len(labels) // 40)
    long = turned and sum(map(len, labels)) > 40
    options: Any = {"rotation": 45, "ha": "right", "rotation_mode": "anchor"} if long else {}
    axis.set_ticks(range(0, len(labels), every), [_short(each) for each in labels[::every]], **options)


def _short(label: str) -> str:
    return label if len(label) <= 24 else label[:23] + "…"


def _legend(axes: Axes, series: Mapping[str, Any]) -> None:
    if len(series) > 1:
        axes.legend()


@matplotlib.rc_context(STYLE)
def error_curves(
    axes: Axes, curves: Sequence[Curve], *, x_label: str, y_label: str, title: str = "", log_x: bool = False
) -> None:
    """Draw error curves on a logarithmic axis: for each curve a line of means and a band of one standard deviation."""
    low, high = np.inf, -np.inf
    for curve in curves:
        mean = np.asarray(curve.mean, dtype=float)
        spread = np.zeros_like(mean) if curve.spread is None else np.asarray(curve.spread, dtype=float)
        (line,) = axes.plot(curve.x, mean, label=curve.label)
        axes.fill_between(curve.x, mean - spread, mean + spread, color=line.get_color(), alpha=0.2, linewidth=0)
        low = min(low, np.min(mean, where=mean > 0, initial=np.inf))
        high = max(high, np.max(mean + spread, initial=-np.inf))
    axes.set_yscale("log", nonpositive="clip")
    if np.isfinite(low) and np.isfinite(high):
        # A band that reaches zero is unbounded on a logarithmic axis, so the means set the lower limit.
        axes.set_ylim(low / 2, high * 2)
    if log_x:
        axes.set_xscale("log")
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.set_title(title)
    axes.legend()
