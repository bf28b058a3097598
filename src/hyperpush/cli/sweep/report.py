"""A sweep's result, tables and figure."""

from pathlib import Path
from typing import Any

from rich.console import Console

from hyperpush.cli.sweep.cells import CellResult, Finished, folder_of, run, scores_of, write
from hyperpush.cli.sweep.plan import Plan
from hyperpush.cli.sweep.statistics import interval, mean_of
from hyperpush.runs import saved
from hyperpush.runs.report.tables import table


def sweep(plan: Plan, out: Path | None = None, console: Console | None = None) -> tuple[dict[str, Any], Path]:
    """Run a plan and report it; gives the result and its folder, which `hyperpush.load` reads."""
    console = console or Console(stderr=True)
    folder = folder_of(plan, out)
    found = run(plan, folder, console)
    result = result_of(plan, found)
    lines = [_record(plan, each, phase) for one in found for phase, each in _phases(one)]
    write(folder / saved.METRICS, "".join(saved.to_json(line) + "\n" for line in lines))
    write(folder / saved.RESULT, saved.to_json(result) + "\n")
    _show(plan, result, console)
    _draw(plan, result, folder)
    return result, folder


def result_of(plan: Plan, found: list[Finished]) -> dict[str, Any]:
    """A row for every method and reported seed, a summary and the tuning scores of every method, and what failed."""
    rows, summary, tuning, failed = [], [], [], []
    for one in found:
        label = plan.methods[one.method].label
        setting = None if one.chosen is None else plan.points[one.chosen].options
        done = [each for each in one.reported if each.state == "done"]
        rows += [{**each.row, "method": label, "seed": each.cell.seed, "setting": setting} for each in done]
        reasons = [each.reason for each in (*one.tuning, *one.reported) if each.state == "n/a"]
        summary.append(
            {
                "method": label,
                "setting": setting,
                "point": None if one.chosen is None else plan.points[one.chosen].label,
                "at_the_end_of_the_grid": _at_the_end(plan, one.chosen),
                "seeds": [each.cell.seed for each in done],
                "not_applicable": reasons[0] if reasons else None,
                **{name: interval([each.row[name] for each in done])._asdict() for name in plan.rule.test if done},
            }
        )
        if one.tuning:
            states = [[each.state for each in one.tuning if each.cell.point == p] for p in range(len(plan.points))]
            tuning.append(
                {"method": label, "scores": scores_of(plan, one.tuning), "states": states, "chosen": one.chosen}
            )
        failed += [_record(plan, each, phase) for phase, each in _phases(one) if _is_failure(phase, each)]
    return {
        "experiment": plan.experiment.name,
        "rows": rows,
        "summary": summary,
        "chosen_by": {"field": plan.rule.validation, "better": plan.rule.better, "seeds": plan.tuning_seeds},
        "grid": [each.options for each in plan.points],
        "tuning": tuning,
        "failed": failed,
    }


def _phases(one: Finished) -> list[tuple[str, CellResult]]:
    return [*(("tuning", each) for each in one.tuning), *(("reported", each) for each in one.reported)]


def _is_failure(phase: str, each: CellResult) -> bool:
    """A setting that diverges is an answer of the tuning; a reported run has to end well."""
    return each.state == "failed" or (phase == "reported" and each.state == "diverged")


def _record(plan: Plan, each: CellResult, phase: str) -> dict[str, Any]:
    return {
        "phase": phase,
        "method": plan.methods[each.cell.method].label,
        "setting": plan.points[each.cell.point].options,
        "seed": each.cell.seed,
        "state": each.state,
        "reason": each.reason or None,
        "cell": each.cell.name,
        # A tuning run's test scores are nobody's business.
        **{
            name: each.row[name]
            for name in (*(plan.rule.test if phase == "reported" else ()), plan.rule.validation)
            if name in each.row
        },
    }


def _at_the_end(plan: Plan, chosen: int | None) -> list[str]:
    """Options whose chosen value is the least or the largest of the grid: better ones may lie beyond it."""
    if chosen is None:
        return []
    ends = []
    for name, value in plan.points[chosen].options.items():
        values = [each.options[name] for each in plan.points]
        if all(isinstance(each, int | float) for each in values) and len(set(values)) > 1:
            ends += [name] if value in (min(values), max(values)) else []
    return ends


def _show(plan: Plan, result: dict[str, Any], console: Console) -> None:
    if result["tuning"]:
        columns = ("method", *(each.label for each in plan.points))
        title = f"tuning: {plan.rule.validation}, mean over seeds {list(plan.tuning_seeds)}; * is chosen"
        console.print(table(title, columns, [_tuning_line(each) for each in result["tuning"]]))
    columns = ("method", "setting", "seeds", *(part for name in plan.rule.test for part in (name, "95 % interval")))
    lines = []
    for each in result["summary"]:
        scores = [part for name in plan.rule.test for part in _score(each.get(name))]
        if each["not_applicable"]:
            scores[0] = f"n/a: {each['not_applicable']}"
        lines.append((each["method"], each["point"], len(each["seeds"]), *scores))
    console.print(table(f"{plan.experiment.name}: mean ± sd over seeds", columns, lines))
    ends = {each["method"]: each["at_the_end_of_the_grid"] for each in result["summary"]}
    if named := [f"{method} ({', '.join(names)})" for method, names in ends.items() if names]:
        console.print(
            "chosen at an end of the grid, so that more may be won beyond it:", "; ".join(named), markup=False
        )
    for each in result["failed"]:
        line = f"failed: {each['phase']}, {each['method']}, seed {each['seed']} ({each['cell']}): {each['reason']}"
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _tuning_line(each: dict[str, Any]) -> tuple[str, ...]:
    cells = []
    for point, (scores, states) in enumerate(zip(each["scores"], each["states"], strict=True)):
        mean = mean_of(scores)
        text = next((state for state in states if state != "done"), "–") if mean is None else f"{mean:.4g}"
        cells.append(f"{text} *" if point == each["chosen"] else text)
    return (each["method"], *cells)


def _score(found: dict[str, Any] | None) -> tuple[str, str]:
    if found is None:
        return "–", "–"
    if found["sd"] is None:
        return f"{found['mean']:.4g}", "–"
    return f"{found['mean']:.4g} ± {found['sd']:.2g}", f"{found['low']:.4g} … {found['high']:.4g}"


def _draw(plan: Plan, result: dict[str, Any], folder: Path) -> None:
    """Validation by setting, and the reported scores with their intervals and the runs behind them."""
    from hyperpush.runs.report.figures import panels

    figure, axes = panels(1 + len(plan.rule.test) if result["tuning"] else len(plan.rule.test))
    if result["tuning"]:
        left = axes.pop(0)
        for each in result["tuning"]:
            known = [(place, mean) for place, own in enumerate(each["scores"]) if (mean := mean_of(own)) is not None]
            if known:
                left.plot([place for place, _ in known], [mean for _, mean in known], ".-", label=each["method"])
        left.set_xticks(range(len(plan.points)), [point.label for point in plan.points], rotation=60, fontsize=6)
        left.set_ylabel(plan.rule.validation)
        if left.lines:
            left.legend(fontsize=6)
    shown = [each for each in result["summary"] if each["seeds"]]
    for name, panel in zip(plan.rule.test, axes, strict=True):
        for place, each in enumerate(shown):
            runs = [row[name] for row in result["rows"] if row["method"] == each["method"]]
            panel.plot(runs, [place] * len(runs), ".", color="grey", alpha=0.6)
            low, high = each[name]["low"], each[name]["high"]
            if low is not None:
                panel.plot([low, high], [place, place], color="C0")
            panel.plot(each[name]["mean"], place, "o", color="C0")
        panel.set_yticks(range(len(shown)), [each["method"] for each in shown])
        panel.invert_yaxis()
        panel.set_xlabel(f"{name}: mean, 95 % interval, runs")
    path = folder / saved.FIGURES / "sweep.png"
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, format="png")
