"""Panels of results contain the results' numbers, and their figures can be drawn."""

import inspect
import io
import json
from typing import Any

import jax.numpy as jnp
import matplotlib
import numpy as np
import pytest
from rich.console import Console

import hyperpush as hp
from hyperpush.base import panels
from hyperpush.base.figures import draw, draw_panel, svg
from hyperpush.base.figures import panels as axes_of
from hyperpush.verbs.result_panels import leaf_panel, network_panel, status_words

NAMES = ["A", "B", "C"]
PICTURES = [
    panels.lines("Cost", [0, 1, 2], {"mean": [3.0, 2.0, np.nan]}, low={"mean": [2, 1, 1]}, high={"mean": [4, 3, 2]}),
    panels.bars(
        "Losses",
        NAMES,
        {"alone": [1, 2, 3], "together": [1, None, 2]},
        low={"alone": [0, 1, 2]},
        high={"alone": [2, 3, 4]},
    ),
    panels.bars("Gains", NAMES, {"gain": [1.0, -1.0, 0.1]}, marks=["helps", "hurts", "cannot say"]),
    panels.heat("Cells", NAMES, NAMES, [[None, 1.0, -2.0], [0.5, None, 0.1], [1, 1, None]]),
    panels.shares("Labels", NAMES, {"no": [1, 3, 0], "yes": [3, 1, 0]}, counts=[4, 4, 0]),
    panels.network("Ring", NAMES, [(0, 1, 1.0), (1, 2, 0.5), (2, 0, 0.25)], directed=True),
    panels.network("Line", NAMES, [(0, 1, 1.0), (1, 2, 1.0)], directed=False),
]


def axes_with(panel) -> Any:
    _, (axes,) = axes_of()
    draw_panel(axes, panel)
    return axes


def test_panels_hold_numbers_that_json_can_hold():
    for panel in PICTURES:
        assert json.loads(json.dumps(panel.to_dict(), allow_nan=False))["kind"] == panel.kind
    assert PICTURES[0].numbers["series"]["mean"] == [3.0, 2.0, None]
    assert panels.table("T", ("a", "b"), [(1, np.float32(2)), (np.inf, "x")]).numbers["rows"] == [[1, 2.0], [None, "x"]]


def test_bars_stand_where_their_numbers_are():
    axes = axes_with(PICTURES[1])
    heights = [patch.get_height() for patch in axes.patches]
    np.testing.assert_array_equal(heights, [1, 2, 3, 1, np.nan, 2])
    assert [text.get_text() for text in axes.get_xticklabels()] == NAMES
    (intervals,) = [each for each in axes.collections if len(each.get_segments()) == 3]
    np.testing.assert_allclose([segment[:, 1] for segment in intervals.get_segments()], [[0, 2], [1, 3], [2, 4]])


def test_marks_color_bars_by_their_word():
    axes = axes_with(PICTURES[2])
    drawn = {patch.get_height(): patch.get_facecolor() for patch in axes.patches if patch.get_width() > 0}
    assert len(set(drawn.values())) == 3
    assert sorted(axes.get_legend_handles_labels()[1]) == ["cannot say", "helps", "hurts"]


def test_shares_of_a_bar_add_up_to_all_of_it():
    widths = np.array([patch.get_width() for patch in axes_with(PICTURES[4]).patches]).reshape(2, 3)
    np.testing.assert_allclose(widths, [[25, 75, 0], [75, 25, 0]])


def test_a_heat_map_of_both_signs_is_colored_around_zero():
    (image,) = axes_with(PICTURES[3]).get_images()
    assert image.norm.vmin == -image.norm.vmax == -2
    assert np.isnan(np.ma.filled(image.get_array(), np.nan)[0, 0])


def test_all_pictures_fit_in_one_figure():
    figure = draw([*PICTURES, panels.text("Words", "Left out.")])
    titles = [axes.get_title(loc="left") for axes in figure.axes if axes.get_title(loc="left")]
    assert sorted(titles) == sorted(panel.title for panel in PICTURES)
    assert figure._repr_png_()[:4] == b"\x89PNG"
    assert matplotlib.rcParams["axes.spines.top"]  # the figure style is restored


def test_an_svg_has_its_own_ids_and_a_name():
    one, two = (svg(PICTURES[0], prefix) for prefix in ("p0-", "p1-"))
    assert one.startswith("<svg")
    assert 'aria-label="Cost"' in one
    assert one.replace("p0-", "") == two.replace("p1-", "")
    assert 'id="p0-' in one
    assert 'href="#p1-' not in one


def test_what_does_not_fit_is_refused():
    with pytest.raises(hp.InvalidInput, match="2 values"):
        panels.bars("Losses", NAMES, {"alone": [1, 2]})
    with pytest.raises(hp.InvalidInput, match="marks"):
        panels.bars("Losses", NAMES, {"a": [1, 2, 3], "b": [1, 2, 3]}, marks=NAMES)
    with pytest.raises(hp.InvalidInput, match="without pictures"):
        draw([panels.text("Words", "Only these.")])


def test_results_show_status_costs_hypers_and_network():
    task, network = hp.tasks.quadratic(3, seed=0), hp.networks.Exponential(3)
    trained = hp.train(task, hp.SGP(steps=4, step_size=0.1), network, key=0, every=2, metrics={"size": size})
    found = {panel.title: panel for panel in trained.panels()}
    assert list(found) == [
        "Status",
        "Costs",
        "Outer cost by step",
        "size by step",
        "Hypers by client",
        "Network: Exponential",
    ]
    assert ["rounds of communication", 4] in found["Costs"].numbers["rows"]
    np.testing.assert_allclose(
        found["size by step"].numbers["series"]["mean over clients"], trained.history.columns()["size"]
    )
    np.testing.assert_allclose(found["Hypers by client"].numbers["values"], task.hypers)
    trained.plot().savefig(io.BytesIO())


def size(params, hyper, batch):
    return jnp.sum(params**2) * jnp.ones(len(batch[0]) if isinstance(batch, tuple) else len(batch))


def test_an_undirected_link_is_drawn_once_and_weighed_by_how_often_it_is_up():
    ring = network_panel(hp.networks.Ring(4), list("ABCD")).numbers
    assert sorted(ring["links"]) == [[0, 1, 1.0], [0, 3, 1.0], [1, 2, 1.0], [2, 3, 1.0]]
    random = network_panel(hp.networks.RandomDirected(3, probability=0.5), NAMES).numbers
    assert [up for _, _, up in random["links"]] == [0.5] * 6


def test_many_hypers_become_a_table_of_ranges():
    assert leaf_panel("H", NAMES, np.ones((3, 1))).kind == "bars"
    assert leaf_panel("H", NAMES, np.ones((3, 2, 2))).kind == "heat"
    many = leaf_panel("H", NAMES, np.arange(300.0).reshape(3, 100))
    assert many.numbers["rows"][1] == ["B", 100, 100.0, 149.5, 199.0]


def test_status_words_name_the_cause():
    assert status_words(hp.Status(converged=True, reason="tolerance"))[0].startswith("The result converged")
    failed = hp.Status(converged=False, reason="limit", error=0.3, runs=5, failed=2)
    assert status_words(failed)[0] == "The result did not converge: step limit reached."
    assert "2 of 5 solves and estimates did not converge." in status_words(failed)


def test_results_that_are_not_of_one_run_have_panels():
    task, network = hp.tasks.quadratic(3, seed=0), hp.networks.Ring(3)
    over = {"step_size": [0.01, 0.1]}
    with pytest.warns(UserWarning, match="on: 'validation'"):
        tuned = hp.tune(task, hp.SGP(5, 0.1), network, key=0, over=over, on="validation")
    scores = tuned.panels()[1].numbers
    np.testing.assert_allclose(scores["series"]["score"], [row.score for row in tuned.rows])
    assert scores["marks"].count("best") == 1
    mean = hp.average(jnp.array([[1.0, 2.0], [3.0, 4.0], [5.0, 9.0]]), network, key=0)
    np.testing.assert_allclose(mean.panels()[2].numbers["values"], [[3.0, 5.0]])


def test_every_public_class_with_a_status_has_panels():
    spaces = [hp, *(getattr(hp, name) for name in dir(hp) if inspect.ismodule(getattr(hp, name)))]
    offered = [getattr(space, name) for space in spaces if space is not hp.extend for name in dir(space)]
    results = {each for each in offered if inspect.isclass(each) and "status" in fields_of(each)}
    assert {hp.Training, hp.Mean, hp.AuditResult, hp.tables.LinearModel, hp.influence.Effects} <= results
    assert [each.__name__ for each in results if not callable(getattr(each, "panels", None))] == []


def fields_of(kind) -> set[str]:
    return {name for each in kind.__mro__ for name in getattr(each, "__annotations__", {})}


def test_a_bar_shows_steps_and_cost_on_a_terminal_and_nothing_elsewhere():
    task, network = hp.tasks.quadratic(3, seed=0), hp.networks.Ring(3)
    screens = [Console(file=io.StringIO(), force_terminal=terminal, width=100) for terminal in (True, False)]
    for screen in screens:
        hooks = [hp.hooks.Bar(screen)]
        hp.train(task, hp.SGP(steps=4, step_size=0.1), network, key=0, every=2, hooks=hooks, metrics={"size": size})
    shown, nothing = (screen.file.getvalue() for screen in screens)  # pyright: ignore[reportAttributeAccessIssue]
    assert "of 4, cost " in shown
    assert nothing == ""
