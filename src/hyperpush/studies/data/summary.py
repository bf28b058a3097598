"""Who has what: a table and a figure of a partition."""

from typing import Any

import numpy as np

from hyperpush.runs.report.figures import panels
from hyperpush.runs.run import StudyRun
from hyperpush.studies.data.partition import Shift, Split, counts
from hyperpush.studies.data.sources import Dataset


def describe(data: Dataset, split: Split, shift: Shift | None = None) -> dict[str, Any]:
    """Numbers of a partition, as an experiment's result keeps them."""
    by_label = _count_labels(data, split)
    found: dict[str, Any] = {
        "data": data.name,
        "note": data.note,
        "clients": len(split.train),
        **{part: [len(own) for own in owned] for part, owned in split._asdict().items()},
        "labels": np.count_nonzero(by_label, axis=1).tolist(),
        "commonest_label": (by_label.max(1) / by_label.sum(1)).tolist(),
    }
    if shift is not None:
        found |= {name: values.tolist() for name, values in shift._asdict().items()}
    return found


def show(run: StudyRun, data: Dataset, split: Split, shift: Shift | None = None) -> dict[str, Any]:
    """Print and draw a partition into a run; gives the numbers of `describe`."""
    found = describe(data, split, shift)
    names = {
        "train": "training examples",
        "validation": "validation examples",
        "test": "test examples",
        "labels": f"labels of {data.classes}",
        "commonest_label": "share of the commonest label",
        "mean": "mean taken off inputs",
        "std": "inputs divided by",
    }

    def row(key: str, name: str) -> tuple[Any, ...]:
        least, median, most = (float(each) for each in np.quantile(found[key], (0, 0.5, 1)))
        return name, least, median, most, sum(found[key]) if key in split._fields else None

    rows = [row(key, name) for key, name in names.items() if key in found]
    title = f"{data.note or data.name}; {found['clients']} clients"
    run.table(title, ("per client", "least", "median", "most", "all"), rows)

    figure, (axes,) = panels()
    drawn = axes.imshow(_count_labels(data, split), aspect="auto", interpolation="nearest", cmap="viridis")
    axes.grid(visible=False)
    axes.set(xlabel="label", ylabel="client", title=f"{data.name}: examples by client and label")
    figure.colorbar(drawn, ax=axes)
    run.figure("clients", figure)
    return found


def _count_labels(data: Dataset, split: Split) -> np.ndarray:
    return sum(counts(data.labels, data.classes, owned) for owned in split)  # pyright: ignore[reportReturnType]
