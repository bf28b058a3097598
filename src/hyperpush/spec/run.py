"""Run a spec as an experiment, and write every owner's model, the history, and the costs."""

from typing import Any

import numpy as np

from hyperpush.influence.scores import Influence
from hyperpush.runs.run import StudyRun
from hyperpush.spec import objects
from hyperpush.spec.experiment import SpecConfig
from hyperpush.verbs.results import History, Result
from hyperpush.verbs.saving import save_result, summarize

SHOWN = 10  # largest number of records in a printed table


def run(config: SpecConfig, run: StudyRun) -> dict[str, Any]:
    """Run the spec, write every owner's model, and return the content of `result.json`."""
    spec = objects.read(config.tables())
    with run.progress(spec.verb, 1) as bar:
        result = spec.run(hooks=(bar,))
    return report(result, spec, run)


def check(config: SpecConfig) -> None:
    """Raise InvalidInput if the spec is invalid; `hyperpush sweep` checks all runs before it starts the first."""
    objects.read(config.tables())


def report(result: Result, spec: objects.Spec, run: StudyRun) -> dict[str, Any]:
    """Save a result into a run folder, show it on the terminal, and return the content of `result.json`."""
    found = {"verb": spec.verb, **summarize(result)}
    rows = history_rows(getattr(result, "history", None))
    for row in rows:
        run.append("row", row)
    if rows:
        names = dict.fromkeys(name for row in rows for name in row)
        found["history"] = {name: [row.get(name) for row in rows] for name in names}
    save_result(run, result)
    if isinstance(result, Influence):
        found |= scores_of(result)
        change = "change of all validation losses if removed"
        lines = [(each, row, score) for each, own in found["scores"].items() for row, score in enumerate(own)]
        worst = sorted((line for line in lines if line[2] < 0), key=lambda line: line[2])[:SHOWN]
        run.table("records that hurt most", ("client", "example", change), worst)
        if result.parties is not None:
            columns = ("client", "change of the others' validation losses if it leaves")
            run.table("clients", columns, sorted(found["clients"].items(), key=lambda line: line[1]))
    last = rows[-1] if rows else {}
    found["rows"] = [{"method": type(spec.method).__name__, **last}]  # the scores that a sweep uses and reports
    if "cost" in last:
        found["cost_before"], found["cost_after"] = rows[0].get("cost"), last["cost"]
    shown = {**found["costs"], **{name: found[name] for name in ("cost_before", "cost_after") if name in found}}
    shown.pop("accesses")
    lines = [*((name.replace("_", " "), value) for name, value in shown.items()), ("status", str(result.status))]
    run.table(repr(result).split(";")[0] + ")", ("quantity", "value"), lines)
    return found


def scores_of(result: Influence) -> dict[str, Any]:
    """Return influence scores in the form of `result.json`, by client name.

    They cover examples, and if requested also clients and single validation examples.
    """
    names = result.task.names
    scores = {owner: own.tolist() for owner, own in zip(result.names, result.examples, strict=True)}
    found = {"scores": scores, "totals": dict(zip(result.names, result.totals.tolist(), strict=True))}
    if result.parties is not None:
        rows = [dict(zip(names, row, strict=True)) for row in result.by_site.tolist()]
        found["clients"] = dict(zip(result.names, result.clients.tolist(), strict=True))
        found |= {"by_site": dict(zip(result.names, rows, strict=True)), "parties": result.parties.how}
    if not result.validation:
        return found
    places = [[names[client], number] for client, number in result.validation]
    rows = {owner: own.tolist() for owner, own in zip(result.names, result.by_validation, strict=True)}
    return {**found, "validation": places, "by_validation": rows}


def history_rows(history: object) -> list[dict[str, float]]:
    """Return the rows of a history as dicts of means over clients, without numbers that are not finite."""
    if not isinstance(history, History):
        return []
    rows = [
        {name: float(column[row]) for name, column in history.columns().items() if np.isfinite(column[row])}
        for row in range(len(history))
    ]
    counts = ("step", "rounds", "floats")
    return [{name: int(value) if name in counts else value for name, value in row.items()} for row in rows]
