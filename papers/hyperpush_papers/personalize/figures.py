"""Figures of the comparison of personal models."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from hyperpush.base.figures import panels
from hyperpush.runs.run import StudyRun
from hyperpush_papers.common.figures import draw_matrix
from hyperpush_papers.personalize.scenarios import Scenario


def draw_partition(run: StudyRun, made: Scenario) -> None:
    """Plot the number of examples by client and label."""
    figure, (axes,) = panels()
    draw_matrix(figure, axes, made.label_counts(), "label", "client", bar="examples")
    axes.set_title(f"{made.data.name}: examples by client and label")
    run.figure("clients", figure)


def draw_accuracies(run: StudyRun, details: list[dict[str, Any]]) -> None:
    """Draw the test accuracies of clients, and validation accuracy by outer step."""
    figure, (left, right) = panels(2)
    for detail in details:
        left.plot(sorted(detail["clients"]), label=detail["method"])
        if len(detail["validation_by_outer_step"]) > 1:
            right.plot(detail["validation_by_outer_step"], label=detail["method"])
    left.set(xlabel="clients, from the worst", ylabel="test accuracy")
    right.set(xlabel="outer step", ylabel="validation accuracy")
    if details:
        left.legend(fontsize=6)
    run.figure("accuracy", figure)


def draw_weights(run: StudyRun, made: Scenario, details: list[dict[str, Any]]) -> None:
    """Draw the learned weights: those of models by true cluster, and those of labels beside the labels' frequencies."""
    for detail in details:
        method = detail["method"]
        stem = f"weights-{method.replace(',', '').replace(' ', '')}"
        if "models_by_cluster" in detail:
            figure, (axes,) = panels()
            values = np.asarray(detail["models_by_cluster"])
            draw_matrix(figure, axes, values, "model", "true cluster of clients", bar="mean weight", vmin=0, vmax=1)
            axes.set_title(method)
            run.figure(stem, figure)
        for part, of, values in learned_weights(detail):
            if of == "labels":
                figure, (left, right) = panels(2)
                draw_matrix(figure, left, made.label_shares(), "label", "client", bar="share of training examples")
                draw_matrix(figure, right, np.asarray(values), "label", "client", bar="weight")
                right.set_title(method)
                run.figure(f"{stem}-{part}", figure)


def learned_weights(detail: dict[str, Any]) -> Iterator[tuple[str, str, list[list[float]]]]:
    """Yield the weights that a method has learned: recipe, meaning, and values by client."""
    for part, own in detail["weights"].items():
        for of, values in own.items():
            yield part, of, values
