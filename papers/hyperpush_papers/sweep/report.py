"""Result and tables of a sweep."""

from pathlib import Path
from typing import Any

from rich.console import Console

from hyperpush.base.files import write_atomically
from hyperpush.runs.events import event, to_json, write_events
from hyperpush.runs.folder import METRICS, RESULT
from hyperpush.runs.tables import table
from hyperpush_papers.sweep.cells import CellResult, Finished, folder_of, run, scores_of
from hyperpush_papers.sweep.plan import Plan
from hyperpush_papers.sweep.statistics import interval, mean_of


def sweep(plan: Plan, out: Path | None = None, console: Console | None = None) -> tuple[dict[str, Any], Path]:
    """Run a plan and report it; return the result and its folder, which `hyperpush.load` reads."""
    console = console or Console(stderr=True)
    folder = folder_of(plan, out)
    found = run(plan, folder, console)
    result = result_of(plan, found)
    write_events(folder / METRICS, [event("cell", _record(plan, each)) for one in found for each in one.results])
    write_atomically(folder / RESULT, to_json(result) + "\n")
    _show(plan, result, console)
    return result, folder


def result_of(plan: Plan, found: list[Finished]) -> dict[str, Any]:
    """Return a row for every method and reported seed, a summary and tuning scores of every method, and failures."""
    rows, tuning = [], []
    for one in found:
        label, setting = one.method.label, None if one.chosen is None else plan.points[one.chosen].options
        done = [each for each in one.of("reported") if each.state == "done"]
        rows += [
            {**each.row, "method": label, "seed": each.cell.seed, "setting": setting, "converged": each.converged}
            for each in done
        ]
        if tried := one.of("tuning"):
            states = [[each.state for each in tried if each.cell.point is point] for point in plan.points]
            converged = [[each.converged for each in tried if each.cell.point is point] for point in plan.points]
            known = {"scores": scores_of(plan, tried), "states": states, "converged": converged}
            tuning.append({"method": label, **known, "chosen": one.chosen})
    return {
        "experiment": plan.experiment.name,
        "rows": rows,
        "summary": [_summarize(plan, one) for one in found],
        "chosen_by": {"field": plan.rule.validation, "better": plan.rule.better, "seeds": plan.tuning_seeds},
        "grid": [each.options for each in plan.points],
        "tuning": tuning,
        "failed": [_record(plan, each) for one in found for each in one.results if _is_failure(each)],
    }


def _summarize(plan: Plan, one: Finished) -> dict[str, Any]:
    """Return the selected point of a method, and its scores over the reported seeds."""
    point = None if one.chosen is None else plan.points[one.chosen]
    done = [each for each in one.of("reported") if each.state == "done"]
    return {
        "method": one.method.label,
        "setting": None if point is None else point.options,
        "point": None if point is None else point.label,
        "at_the_end_of_the_grid": _at_the_end(plan, one.chosen),
        "seeds": [each.cell.seed for each in done],
        "not_converged": [each.cell.seed for each in done if each.converged is False],
        "not_applicable": next((each.reason for each in one.results if each.state == "n/a"), None),
        **{name: interval([each.row[name] for each in done])._asdict() for name in plan.rule.test if done},
    }


def _is_failure(each: CellResult) -> bool:
    """Return True if a cell failed: its run raised an error, or it is a reported run that diverged."""
    return each.state == "failed" or (each.cell.phase == "reported" and each.state == "diverged")


def _record(plan: Plan, each: CellResult) -> dict[str, Any]:
    cell = each.cell
    names = (*plan.scores(cell.phase), plan.rule.validation)
    return {
        "phase": cell.phase,
        "method": cell.method.label,
        "setting": cell.point.options,
        "seed": cell.seed,
        "state": each.state,
        "converged": each.converged,
        "reason": each.reason or None,
        "cell": cell.name,
        **{name: each.row[name] for name in names if name in each.row},
    }


def _at_the_end(plan: Plan, chosen: int | None) -> list[str]:
    """Return options whose selected value is at an end of the grid, because better values may be outside."""
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
        title = (
            f"tuning: {plan.rule.validation}, mean over seeds {list(plan.tuning_seeds)}; * is chosen, ! not converged"
        )
        console.print(table(title, columns, [_tuning_line(each) for each in result["tuning"]]))
    columns = ("method", "setting", "seeds", *(part for name in plan.rule.test for part in (name, "95 % interval")))
    lines = []
    for each in result["summary"]:
        scores = [part for name in plan.rule.test for part in _score(each.get(name))]
        if each["not_applicable"]:
            scores[0] = f"n/a: {each['not_applicable']}"
        failed, count = len(each["not_converged"]), len(each["seeds"])
        lines.append(
            (each["method"], each["point"], f"{count}, ! {failed} not converged" if failed else count, *scores)
        )
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
        mark = " !" if False in each["converged"][point] else ""
        cells.append(f"{text}{mark} *" if point == each["chosen"] else text + mark)
    return (each["method"], *cells)


def _score(found: dict[str, Any] | None) -> tuple[str, str]:
    if found is None:
        return "–", "–"
    if found["sd"] is None:
        return f"{found['mean']:.4g}", "–"
    return f"{found['mean']:.4g} ± {found['sd']:.2g}", f"{found['low']:.4g} … {found['high']:.4g}"
