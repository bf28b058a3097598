"""Figures in one style. They are drawn without pyplot: no display and no global state."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

STYLE: Any = {
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": "medium",
    "figure.dpi": 150,
    "font.size": 9,
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "lines.linewidth": 1.4,
}


@dataclass(frozen=True)
class Curve:
    """A labeled line: positions, means, and optionally the spread (one standard deviation) around them."""

    label: str
    x: Any
    mean: Any
    spread: Any = None


@matplotlib.rc_context(STYLE)
def panels(columns: int = 1) -> tuple[Figure, list[Axes]]:
    """A figure with `columns` panels side by side."""
    figure = Figure(figsize=(4.2 * columns, 3.2), layout="constrained")
    return figure, list(figure.subplots(1, columns, squeeze=False)[0])


@matplotlib.rc_context(STYLE)
def error_curves(
    axes: Axes, curves: Sequence[Curve], *, x_label: str, y_label: str, title: str = "", log_x: bool = False
) -> None:
    """Draw errors on a logarithmic axis: a line for each mean and a band for its spread."""
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
        # A band that reaches zero has no bottom on a logarithmic axis; the means set the view.
        axes.set_ylim(low / 2, high * 2)
    if log_x:
        axes.set_xscale("log")
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.set_title(title)
    axes.legend()
