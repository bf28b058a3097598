"""The figure of the first run: the worst records, weights, predictions against retraining, and the gain."""

import matplotlib
import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from hyperpush.base.figures import STYLE
from hyperpush.influence import Influence
from hyperpush.runs.run import StudyRun
from hyperpush_papers.quickstart.parties import KINDS, Parties
from hyperpush_papers.quickstart.report import WON, Row

ROWS, COLUMNS = 4, 6  # rows and columns of records in the figure
HEIGHT, WIDTH = 13, 10  # pixels of a record with the label above it
COLORS = ("tab:blue", "tab:red", "tab:orange")  # by KINDS


@matplotlib.rc_context(STYLE)
def draw(run: StudyRun, story: Row, compared: list[Row]) -> None:
    """Save the figure: accuracies are those of all seeds, all other parts those of one seed."""
    figure = Figure(figsize=(10.5, 7), layout="constrained")
    # two figures, since they have different columns
    upper, lower = figure.subfigures(2, 1, squeeze=False, height_ratios=(1.1, 1))[:, 0]
    records, accuracies = upper.subplots(1, 2)
    weights, removals = lower.subplots(1, 2)
    parties: Parties = story["parties"]
    _draw_records(records, parties, story["scores"])
    _draw_weights(weights, parties, story["weights"])
    _draw_removals(removals, parties, story["removals"])
    _draw_accuracies(accuracies, compared)
    if compared[0]["seeds"] > 1:
        lower.supxlabel(f"Records, weights and predictions: seed {story['removals']['seed']}", fontsize=8)
    run.figure("first-run", figure)


def _draw_records(axes: Axes, parties: Parties, scores: Influence) -> None:
    """Draw the records that hurt most, with their given labels."""
    inputs, labels = parties.records
    changes = np.stack(scores.examples)
    worst = np.argsort(changes, axis=None, kind="stable")[: ROWS * COLUMNS]
    picture = np.zeros((ROWS * HEIGHT, COLUMNS * WIDTH))
    for place, (party, number) in enumerate(zip(*np.unravel_index(worst, changes.shape), strict=True)):
        row, column = divmod(place, COLUMNS)
        top, left = row * HEIGHT + HEIGHT - 8, column * WIDTH + 1
        picture[top : top + 8, left : left + 8] = inputs[party, number].reshape(8, 8)
        color = COLORS[parties.kind[party]]
        axes.text(left + 3.5, top - 1, str(labels[party, number]), color=color, ha="center", va="bottom", weight="bold")
    axes.imshow(picture, cmap="gray_r", vmin=0, vmax=1, interpolation="nearest")
    axes.set_title("Records predicted to hurt most, under the\nlabels they came with, colored by party as below")
    axes.set_axis_off()


def _draw_weights(axes: Axes, parties: Parties, weights: Float[np.ndarray, " n"]) -> None:
    """Draw the learned weight of each party, in increasing order."""
    order = np.argsort(weights, kind="stable")
    for kind, name in enumerate(KINDS):
        places = np.flatnonzero(parties.kind[order] == kind)
        axes.bar(places, weights[order][places], color=COLORS[kind], label=f"{name} ({len(places)})")
    axes.axhline(0.5, color="black", linewidth=0.8, linestyle="--", label="dropped below")
    axes.set(xlabel="parties, from the lowest weight", ylabel="learned weight", ylim=(0, 1.05), xticks=[])
    axes.set_title("One weight per party, learned by hypergradients")
    axes.legend(loc="upper left")


def _draw_removals(axes: Axes, parties: Parties, removals: Row) -> None:
    """Draw predicted against real changes of the total cost, for parties and, in a small plot, for records."""
    inset = axes.inset_axes((0.64, 0.13, 0.34, 0.36))
    colors = [COLORS[kind] for kind in parties.kind]
    for place, of, color in ((axes, "parties", colors), (inset, "records", "black")):
        scale = 100 / removals["cost"]
        predicted, real = (scale * np.array(removals[of][name]) for name in ("predicted", "real"))
        ends = [min(predicted.min(), real.min()), max(predicted.max(), real.max())]
        place.plot(ends, ends, color="gray", linewidth=0.8, label="predicted = real")
        place.scatter(predicted, real, s=14, c=color)
    inset.set_title("single records", fontsize=8)
    inset.tick_params(labelsize=7)
    axes.set(xlabel="predicted change of the total cost, %", ylabel="after retraining, %")
    axes.legend(loc="upper left")
    axes.set_title("What leaving out each party does, from one estimate")


def _draw_accuracies(axes: Axes, compared: list[Row]) -> None:
    """Draw the mean test accuracy of every method."""
    names = [row["method"] for row in compared]
    values = [100 * row["accuracy"] for row in compared]
    colors = {"hypergradient": "tab:green", "control": "lightgray", "bound": "white"}
    style = {"edgecolor": "gray", "linewidth": 0.6}
    bars = axes.barh(names, values, color=[colors[row["group"]] for row in compared], **style)
    legend = {"by hypergradients": "hypergradient", "controls": "control", "bounds": "bound"}
    patches = [Patch(facecolor=colors[group], label=said, **style) for said, group in legend.items()]
    axes.legend(handles=patches, loc="lower right", fontsize=7)
    axes.bar_label(bars, fmt="%.1f", fontsize=7, padding=2)
    for label, name in zip(axes.get_yticklabels(), names, strict=True):
        label.set_fontsize(7)
        label.set_fontweight("bold" if name == WON else "normal")
    seeds = compared[0]["seeds"]
    axes.set(xlim=(0, 112), title="Mean test accuracy, %" + f", of {seeds} seeds" * (seeds > 1))
    axes.grid(visible=False)
    axes.margins(y=0.01)
