"""Figures that several studies draw."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hyperpush.base.figures import Curve, error_curves, panels
from hyperpush.runs.run import StudyRun


def draw_errors(
    run: StudyRun,
    name: str,
    curves: Mapping[str, Mapping[str, Any]],
    error: str,
    by: tuple[str, str],
    y_label: str,
    title: str = "",
) -> None:
    """Plot the field `error` of labeled curves against two other fields, side by side; skip an empty list of curves."""
    if not curves:
        return
    figure, axes = panels(2)
    for axis, x in zip(axes, by, strict=True):
        drawn = [Curve(label, curve[x], curve[error]) for label, curve in curves.items()]
        labels: Any = {"x_label": x.replace("_", " "), "y_label": y_label, "title": title}
        error_curves(axis, drawn, **labels, log_x=True)
        axis.legend(fontsize=5)
    run.figure(name, figure)


def draw_matrix(
    figure: Figure, axes: Axes, values: np.ndarray, x_label: str, y_label: str, *, bar: str, **options: Any
) -> None:
    """Draw a matrix as colors, with a color bar labeled `bar`; `options` go to `Axes.imshow`."""
    drawn = axes.imshow(values, aspect="auto", interpolation="nearest", **options)
    axes.grid(visible=False)
    axes.set(xlabel=x_label, ylabel=y_label)
    figure.colorbar(drawn, ax=axes, label=bar)
