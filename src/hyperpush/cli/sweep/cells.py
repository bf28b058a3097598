"""Running a sweep cell by cell into a folder; cells that are finished are not run again."""

import json
import shutil
import tomllib
import traceback
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import Any, Literal, NamedTuple

from rich.console import Console

from hyperpush.cli.sweep.plan import Cell, Plan
from hyperpush.cli.sweep.statistics import choose
from hyperpush.errors import Diverged, HyperpushError, InvalidInput
from hyperpush.runs import saved
from hyperpush.runs.config import to_toml
from hyperpush.runs.experiment import Tuning
from hyperpush.runs.files import write_atomically as write
from hyperpush.runs.locks import alone
from hyperpush.runs.run import execute

CELLS = "cells"


class CellResult(NamedTuple):
    """How a cell ended: its row, or why there is none."""

    cell: Cell
    state: Literal["done", "n/a", "diverged", "failed"]
    row: dict[str, Any]
    reason: str = ""


class Finished(NamedTuple):
    """All of a method's runs."""

    method: int
    tuning: list[CellResult]
    chosen: int | None  # which point of the grid; None: it can be chosen by nothing
    reported: list[CellResult]


def folder_of(plan: Plan, out: Path | None) -> Path:
    """Where a sweep is kept: the same folder for the same sweep."""
    return out or Path("runs", f"sweep-{plan.experiment.name}-{plan.identity()}")


def run(plan: Plan, folder: Path, console: Console) -> list[Finished]:
    """Tune every method, choose, and run what was chosen with the reported seeds."""
    new = not folder.exists()
    _agree(plan, folder)
    try:
        (folder / CELLS).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidInput("--out", str(folder), f"a folder that can be written ({error.strerror})") from None
    with alone(folder / ".lock", "--out", folder, "a folder that no other sweep is writing to"):
        write(folder / saved.CONFIG, to_toml(plan.experiment.name, plan.config))
        for left in (folder / CELLS).glob(".*.partial"):  # of a process that was killed: nobody else is here
            shutil.rmtree(left)
        found = [_method(plan, folder, method, console) for method in range(len(plan.methods))]
    outcomes = [each for one in found for each in (*one.tuning, *one.reported)]
    if all(each.state == "failed" for each in outcomes):
        if new:
            shutil.rmtree(folder)
        raise HyperpushError(f"sweep: all {len(outcomes)} runs failed, the first with: {outcomes[0].reason}")
    return found


def _method(plan: Plan, folder: Path, method: int, console: Console) -> Finished:
    import jax

    def outcomes(cells: list[Cell], what: str) -> Iterator[CellResult]:
        for place, cell in enumerate(cells):
            began = perf_counter()
            found, kept = outcome(plan, folder, cell)
            said = found.reason or " ".join(f"{key} {found.row[key]:.4g}" for key in _fields(plan.rule, what))
            label = ", ".join(filter(None, (plan.methods[method].label, plan.points[cell.point].label)))
            took = "kept" if kept else f"{perf_counter() - began:.1f} s"
            console.print(
                f"{what} {place + 1}/{len(cells)}  {label}, seed {cell.seed}: {found.state}, {said} ({took})",
                markup=False,
                highlight=False,
                soft_wrap=True,
            )
            yield found
            if found.state == "n/a":
                return

    tuning = list(outcomes(plan.tuning(method), "tuning"))
    if any(each.state == "n/a" for each in tuning):
        return Finished(method, tuning, None, [])
    chosen = 0 if len(plan.points) == 1 else choose(scores_of(plan, tuning), plan.rule.better)
    cells = [] if chosen is None else [plan.cell(method, chosen, seed) for seed in plan.seeds]
    reported = list(outcomes(cells, "reported"))
    jax.clear_caches()  # the next method has programs of its own
    return Finished(method, tuning, chosen, reported)


def scores_of(plan: Plan, tuning: list[CellResult]) -> list[list[float | None]]:
    """Validation scores by point and tuning seed; None where a run has none."""
    found = {(each.cell.point, each.cell.seed): each.row.get(plan.rule.validation) for each in tuning}
    return [[found.get((point, seed)) for seed in plan.tuning_seeds] for point in range(len(plan.points))]


def outcome(plan: Plan, folder: Path, cell: Cell) -> tuple[CellResult, bool]:
    """A cell's outcome, and whether it was there already."""
    path = folder / CELLS / cell.name
    diverged, failed = (path.with_name(f"{cell.name}.{state}") for state in ("diverged", "failed"))
    if diverged.is_file():
        return CellResult(cell, "diverged", {}, diverged.read_text(encoding="utf-8").strip()), True
    kept = (path / saved.RESULT).is_file()
    try:
        if kept:
            _same(path, to_toml(plan.experiment.name, cell.config))
            result = saved.load(path).result
        else:
            # Its tables are not for the terminal, where they would bury the sweep's own lines.
            execute(plan.experiment, cell.config, path, Console(quiet=True))
            result = json.loads((path / saved.RESULT).read_text(encoding="utf-8"))
            failed.unlink(missing_ok=True)
    except Diverged as error:
        write(diverged, f"{error}\n")
        return CellResult(cell, "diverged", {}, str(error)), False
    except Exception as error:
        if kept:
            raise
        write(failed, traceback.format_exc())
        return CellResult(cell, "failed", {}, " ".join(f"{type(error).__name__}: {error}".split())), False
    return _read(plan, cell, result), kept


def _read(plan: Plan, cell: Cell, result: dict[str, Any]) -> CellResult:
    """The one row of a result, with the scores that are needed; an experiment without rows is a row itself."""
    rows = result["rows"] if isinstance(result.get("rows"), list) else [result]
    reasons = result.get("not_applicable")
    if not rows:
        reason = "; ".join(map(str, reasons.values())) if isinstance(reasons, dict) and reasons else "no rows"
        return CellResult(cell, "n/a", {}, reason)
    several = len(rows) + (len(reasons) if isinstance(reasons, dict) else 0)
    if several > 1:  # of two, one of which cannot run, the other's row is not the run's
        allowed = "one row for each run: compare what makes several (sweep.compare)"
        raise InvalidInput("rows", f"{several} rows of {cell.name}", allowed)
    needed = plan.rule.test if cell.seed in plan.seeds else (plan.rule.validation,)
    for name in needed:
        value = rows[0].get(name)
        if not isinstance(value, int | float) or isinstance(value, bool):
            numbers = [key for key, each in rows[0].items() if isinstance(each, int | float)]
            where = "sweep.test" if name in plan.rule.test else "sweep.validation"
            raise InvalidInput(
                where,
                f"{name}, in {cell.name}",
                f"a number of the rows of {plan.experiment.name}: {', '.join(numbers)}",
            )
    return CellResult(cell, "done", rows[0])


def _fields(rule: Tuning, what: str) -> tuple[str, ...]:
    return (rule.validation,) if what == "tuning" else rule.test


def _agree(plan: Plan, folder: Path) -> None:
    """A folder that is there must be this sweep's; only the number of reported seeds may have grown."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    try:
        before = tomllib.loads((folder / saved.CONFIG).read_text(encoding="utf-8"))
        seeds = before["sweep"]["seeds"]
    except (OSError, ValueError, KeyError, TypeError):
        raise InvalidInput("--out", str(folder), "a new or empty folder, or the folder of a sweep") from None
    now = tomllib.loads(to_toml(plan.experiment.name, plan.config))
    if seeds < now["sweep"]["seeds"]:
        before["sweep"]["seeds"] = now["sweep"]["seeds"]
    _refuse_change(folder, before, now)


def _same(path: Path, text: str) -> None:
    _refuse_change(path, saved.load(path).config, tomllib.loads(text))


def _refuse_change(path: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    changed = [
        f"{key} was {before.get(key)!r}, is {now.get(key)!r}"
        for key in sorted({*before, *now})
        if before.get(key) != now.get(key)
    ]
    if changed:
        allowed = f"the folder of a sweep with the same options, or a new one ({'; '.join(changed)})"
        raise InvalidInput("--out", str(path), allowed)
