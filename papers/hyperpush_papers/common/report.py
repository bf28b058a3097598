"""Report of a comparison of bilevel algorithms: private runs, tables, and curves."""

from collections.abc import Mapping, Sequence
from typing import Any

from hyperpush.base.figures import panels
from hyperpush.networks import Network
from hyperpush.runs.run import StudyRun
from hyperpush_papers.common.comparison import Benchmark, Compared, Row
from hyperpush_papers.common.config import Comparison
from hyperpush_papers.common.private_runs import run_privately

AXES = ("iterations", "floats_per_client")


def report(
    config: Comparison,
    run: StudyRun,
    network: Network,
    found: Sequence[Compared],
    benchmarks: tuple[Benchmark, Benchmark | None],
    name: str,
    data: str,
    references: Mapping[str, Row],
    metrics: Sequence[str],
) -> Row:
    """Run methods privately; show and return rows, references, private rows and curves of the comparison."""
    private = run_privately(config, run, network, found, *benchmarks)
    rows, curves = [each.row for each in found], [each.curve for each in found if each.curve is not None]
    table(run, f"{name} on {data}", rows)
    table(run, "references", [{"reference": key, **each} for key, each in references.items()])
    if private:
        table(run, "with privacy", private)
    for assumed in dict.fromkeys(row["assumes"] for row in private if "assumes" in row):
        run.console.print(assumed, highlight=False)
    draw(run, name, [*curves, *(level(key, each, curves) for key, each in references.items())], metrics)
    return {"rows": rows, "privacy": {row["method"]: row for row in private} or None, "curves": curves}


def table(run: StudyRun, title: str, rows: Sequence[Row]) -> None:
    """Show rows as a table; rows may have different columns. Settings are written out, and lists are omitted."""
    columns = list(dict.fromkeys(key for row in rows for key in row if not isinstance(row[key], list)))

    def text(value: Any) -> Any:
        if isinstance(value, dict):
            return ", ".join(f"{key} {each:.3g}" for key, each in value.items())
        return value

    shown = [column for column in columns if column != "assumes"]  # `assumes` is printed once, below the table
    run.table(title, shown, [[text(row.get(column)) for column in shown] for row in rows])


def level(name: str, reference: Row, curves: Sequence[Row]) -> Row:
    """Return a curve that is a horizontal line at a reference value."""
    ends = {x: [1, max([1, *(curve[x][-1] for curve in curves)])] for x in AXES}
    values = {key: [value, value] for key, value in reference.items() if isinstance(value, float)}
    return {"method": name, **ends, **values}


def draw(run: StudyRun, name: str, curves: Sequence[Row], metrics: Sequence[str]) -> None:
    """Draw each metric by iteration and by floats sent."""
    for metric in metrics:
        figure, axes = panels(2)
        for axis, x in zip(axes, AXES, strict=True):
            for number, curve in enumerate(curves):
                if metric not in curve:
                    continue
                values = [float("nan") if value is None else value for value in curve[metric]]
                style = ("-", "--", ":")[number // 10 % 3]  # another line style after each ten colors
                axis.plot(curve[x], values, style, label=curve["method"])
            axis.set_xlabel(x.replace("_", " "))
            axis.set_ylabel(metric.replace("_", " "))
            axis.set_xscale("symlog", linthresh=max(1.0, min((v for c in curves for v in c[x] if v > 0), default=1.0)))
        axes[1].legend(fontsize=5)
        run.figure(f"{name}-{metric}", figure)
