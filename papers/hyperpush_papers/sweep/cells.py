"""Run a sweep cell by cell into a folder; a cell is one run, and finished cells are not run again."""

import json
import shutil
import tomllib
import traceback
from pathlib import Path
from time import perf_counter
from typing import Any, Literal, NamedTuple

import jax
from rich.console import Console

from hyperpush.base.errors import Diverged, HyperpushError, InvalidInput
from hyperpush.base.files import write_atomically
from hyperpush.base.locks import alone
from hyperpush.runs.events import to_json
from hyperpush.runs.folder import CONFIG, RESULT
from hyperpush.spec.config import to_toml
from hyperpush.spec.execute import execute
from hyperpush.verbs.saved import load
from hyperpush_papers.sweep.plan import Cell, Choice, Phase, Plan
from hyperpush_papers.sweep.statistics import choose

CELLS = "cells"


class CellResult(NamedTuple):
    """Result of a cell: its row, or the reason why it has none."""

    cell: Cell
    state: Literal["done", "n/a", "diverged", "failed"]
    row: dict[str, Any]
    reason: str = ""
    status: dict[str, Any] | None = None  # status of the run; None without a status

    @property
    def converged(self) -> bool | None:
        """`converged` of the run's status; None without a status."""
        return None if self.status is None else self.status["converged"]


class Finished(NamedTuple):
    """All runs of one method, and its selected point of the grid."""

    method: Choice
    results: list[CellResult]
    chosen: int | None  # index of the selected point of the grid; None if no point has valid scores

    def of(self, phase: Phase) -> list[CellResult]:
        """Return the runs of a phase, tuning or reporting."""
        return [each for each in self.results if each.cell.phase == phase]


def folder_of(plan: Plan, out: Path | None) -> Path:
    """Return the folder of a sweep; equal sweeps share a folder."""
    return out or Path("runs", f"sweep-{plan.experiment.name}-{plan.identity()}")


def run(plan: Plan, folder: Path, console: Console) -> list[Finished]:
    """Tune every method, select a point of its grid, and run this point with the reported seeds."""
    new = not folder.exists()
    _check_folder(plan, folder)
    try:
        (folder / CELLS).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidInput("--out", str(folder), f"a folder that can be written ({error.strerror})") from None
    with alone(folder / ".lock", "--out", folder):
        write_atomically(folder / CONFIG, to_toml(plan.experiment.name, plan.config))
        # left by a killed process; no other process works here, since the folder is locked
        for left in (folder / CELLS).glob(".*.partial"):
            shutil.rmtree(left)
        found = [_run_method(plan, folder, method, console) for method in plan.methods]
    results = [each for one in found for each in one.results]
    if all(each.state == "failed" for each in results):
        if new:
            shutil.rmtree(folder)
        raise HyperpushError(f"sweep: all {len(results)} runs failed, the first with: {results[0].reason}")
    return found


def _run_method(plan: Plan, folder: Path, method: Choice, console: Console) -> Finished:
    """Tune a method and run its selected point; stop at the first cell if the method cannot run."""
    tuning = [plan.cell("tuning", method, point, seed) for point in plan.points for seed in plan.tuning_seeds]
    results = _run_cells(plan, folder, tuning, console)
    if any(each.state == "n/a" for each in results):
        return Finished(method, results, None)
    chosen = 0 if len(plan.points) == 1 else choose(scores_of(plan, results), plan.rule.better)
    if chosen is not None:
        cells = [plan.cell("reported", method, plan.points[chosen], seed) for seed in plan.seeds]
        results += _run_cells(plan, folder, cells, console)
    jax.clear_caches()  # the next method uses other compiled programs
    return Finished(method, results, chosen)


def _run_cells(plan: Plan, folder: Path, cells: list[Cell], console: Console) -> list[CellResult]:
    """Run cells, or read finished cells, and print a line for each; stop at a cell that cannot run."""
    results: list[CellResult] = []
    for place, cell in enumerate(cells, start=1):
        began = perf_counter()
        found, kept = result_of_cell(plan, folder, cell)
        said = found.reason or " ".join(f"{key} {found.row[key]:.4g}" for key in plan.scores(cell.phase))
        if found.status is not None and found.converged is False:
            said += f" ! not converged ({found.status['reason']})"
        label = ", ".join(filter(None, (cell.method.label, cell.point.label)))
        took = "kept" if kept else f"{perf_counter() - began:.1f} s"
        line = f"{cell.phase} {place}/{len(cells)}  {label}, seed {cell.seed}: {found.state}, {said} ({took})"
        console.print(line, markup=False, highlight=False, soft_wrap=True)
        results.append(found)
        if found.state == "n/a":
            break
    return results


def scores_of(plan: Plan, tuning: list[CellResult]) -> list[list[float | None]]:
    """Return validation scores by point and tuning seed; None for runs without one."""

    def score(point: Choice, seed: int) -> float | None:
        own = [each for each in tuning if each.cell.point is point and each.cell.seed == seed]
        return own[0].row.get(plan.rule.validation) if own else None

    return [[score(point, seed) for seed in plan.tuning_seeds] for point in plan.points]


def result_of_cell(plan: Plan, folder: Path, cell: Cell) -> tuple[CellResult, bool]:
    """Return the result of a cell, and True if the cell was finished before."""
    path = folder / CELLS / cell.name
    diverged, failed = (path.with_name(f"{cell.name}.{state}") for state in ("diverged", "failed"))
    if diverged.is_file():
        return CellResult(cell, "diverged", {}, diverged.read_text(encoding="utf-8").strip()), True
    if (path / RESULT).is_file():
        before = load(path)
        _refuse_change(path, before.config, tomllib.loads(to_toml(plan.experiment.name, cell.config)))
        return _read_row(plan, cell, before.result), True
    try:
        # The tables of a cell are not printed, because they would hide the lines of the sweep.
        result, _ = execute(plan.experiment, cell.config, path, Console(quiet=True))
    except Diverged as error:
        write_atomically(diverged, f"{error}\n")
        return CellResult(cell, "diverged", {}, str(error)), False
    except Exception as error:  # an experiment may raise any error; the other cells still run
        write_atomically(failed, traceback.format_exc())
        return CellResult(cell, "failed", {}, " ".join(f"{type(error).__name__}: {error}".split())), False
    failed.unlink(missing_ok=True)
    return _read_row(plan, cell, json.loads(to_json(result))), False


def _read_row(plan: Plan, cell: Cell, result: dict[str, Any]) -> CellResult:
    """Return the only row of a result, with the required scores; a result without `rows` is itself the row."""
    rows = result["rows"] if isinstance(result.get("rows"), list) else [result]
    reasons = result.get("not_applicable")
    reasons = list(map(str, reasons.values())) if isinstance(reasons, dict) else []
    if not rows:
        return CellResult(cell, "n/a", {}, "; ".join(reasons) or "no rows")
    several = len(rows) + len(reasons)
    if several > 1:  # if one of two methods cannot run, the single row left does not stand for both
        allowed = "one row for each run: compare what makes several (sweep.compare)"
        raise InvalidInput("rows", f"{several} rows of {cell.name}", allowed)
    numbers = [key for key, each in rows[0].items() if isinstance(each, int | float) and not isinstance(each, bool)]
    for name in plan.scores(cell.phase):
        if name not in numbers:
            where = "sweep.validation" if cell.phase == "tuning" else "sweep.test"
            allowed = f"a number of the rows of {plan.experiment.name}: {', '.join(numbers)}"
            raise InvalidInput(where, f"{name}, in {cell.name}", allowed)
    return CellResult(cell, "done", rows[0], status=result.get("status"))


def _check_folder(plan: Plan, folder: Path) -> None:
    """Raise InvalidInput if the folder is of another sweep; only the number of reported seeds may have grown."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    try:
        before = tomllib.loads((folder / CONFIG).read_text(encoding="utf-8"))
        seeds = before["sweep"]["seeds"]
    except (OSError, ValueError, KeyError, TypeError):
        raise InvalidInput("--out", str(folder), "a new or empty folder, or the folder of a sweep") from None
    now = tomllib.loads(to_toml(plan.experiment.name, plan.config))
    before["sweep"]["seeds"] = max(seeds, now["sweep"]["seeds"])
    _refuse_change(folder, before, now)


def _refuse_change(path: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    changed = [
        f"{key} was {before.get(key)!r}, is {now.get(key)!r}"
        for key in sorted({*before, *now})
        if before.get(key) != now.get(key)
    ]
    if changed:
        allowed = f"the folder of a sweep with the same options, or a new one ({'; '.join(changed)})"
        raise InvalidInput("--out", str(path), allowed)
