"""Tables and figures of results."""

import io

from rich.console import Console

from hyperpush.base.figures import Curve, error_curves, panels
from hyperpush.runs.tables import table


def test_a_table_shows_values_as_they_are_read():
    screen = io.StringIO()
    rows = [("[a]", 1.0 / 3, 10), ("b", None, 5)]
    Console(file=screen, width=60).print(table("errors", ("name", "mean", "order"), rows))
    shown = screen.getvalue()
    assert "│ [a]  │ 0.3333 │    10 │" in shown
    assert "│ b    │      – │     5 │" in shown


def test_curves_have_labels_a_logarithmic_axis_and_a_view_set_by_the_means():
    figure, (left, right) = panels(2)
    curves = [
        Curve("S = 1", [1, 10, 100], [1.0, 0.1, 1e-3], [0.5, 0.2, 2e-3]),
        Curve("S = 2", [1, 10, 100], [1.0, 0.5, 0.0]),
    ]
    error_curves(left, curves, x_label="order", y_label="error", title="full batch", log_x=True)
    assert (left.get_xlabel(), left.get_ylabel(), left.get_title()) == ("order", "error", "full batch")
    assert (left.get_xscale(), left.get_yscale(), right.get_yscale()) == ("log", "log", "linear")
    assert left.get_legend_handles_labels()[1] == ["S = 1", "S = 2"]
    low, high = left.get_ylim()
    assert 1e-4 < low < 1e-3
    assert 1.5 < high < 10
    figure.savefig(io.BytesIO())
