"""Show an audit in sentences, tables and pictures."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hyperpush.base import panels
from hyperpush.base.panels import Panel
from hyperpush.verbs import result_panels

if TYPE_CHECKING:
    from hyperpush.audits.result import AuditResult

WORST = 10  # most records of each party that a page lists
RANKED = ("party", "gain", "low", "high", "p", "verdict")


def summary(found: "AuditResult") -> list[str]:
    """Return the conclusions and costs of an audit in a few sentences."""
    names = {verdict: [row.party for row in found.join if row.verdict == verdict] for verdict in ("helps", "hurts")}
    said = [f"Joining helps {_list(names['helps'])}; hurts {_list(names['hurts'])}; the rest: cannot say."]
    if found.named:
        order = [f"{row.party} (without it their loss is lower by {-row.gain:.3g})" for row in found.named]
        said.append(f"Harmful to the others: {', then '.join(order)}.")
    else:
        said.append("No party is named as harmful.")
    if found.small:
        said.append(f"Too few records to take part: {_list(found.small)}.")
    count = len(found.warnings)
    said += [f"{count} warning{'s' * (count > 1)}."] if count else []
    unit = "squared error" if found.about["kind"] == "numbers" else "cross-entropy"
    costs = found.costs
    return [
        *said,
        f"Gains are mean differences of the {unit} per held-out record, with {found.about['folds']} folds.",
        f"{costs.rounds:,} rounds and {_bytes(costs.bytes)} sent per party on {found.about['network']}; "
        f"all rows sent once to a server would have taken {_bytes(found.pooled_bytes)} in all.",
    ]


def panels_of(found: "AuditResult") -> list[Panel]:
    """Return all panels of an audit's page."""
    shown = [result_panels.status_panel(found.status)]
    if found.warnings:
        shown.append(panels.text("Warnings", *found.warnings, tone="bad"))
    shown += [_joining(found), _join_table(found), _leaving(found), _without_table(found), _cells(found)]
    if found.named:
        columns = ("round", "party", "gain", "low", "high", "p")
        rows = [[getattr(row, name) for name in columns] for row in found.named]
        note = "After each round the named party is left out, columns are scaled anew, and the rest is audited again."
        shown.append(panels.table("Parties named as harmful, one at a time", columns, rows, note=note))
    shown += [_shares(found), *_records(found)]
    shown += [panels.text("How to read this page", *_limits(found)), panels.text("Who would learn what", *_learned())]
    return [*shown, result_panels.costs_panel(found.costs), result_panels.network_panel(found.network, _names(found))]


def _joining(found: "AuditResult") -> Panel:
    series = {
        "alone": [row.alone for row in found.join],
        "together": [row.together for row in found.join],
        "without contributing": [row.not_contributing for row in found.join],
    }
    note = "Mean loss on the party's own held-out records; lower is better."
    return panels.bars("Alone, together, and without contributing", _who(found.join), series, y_label="loss", note=note)


def _join_table(found: "AuditResult") -> Panel:
    kinds = ("alone", "together", "not_contributing")
    columns = ["party", "records", *kinds, *RANKED[1:]]
    rows: list[list[Any]] = [[getattr(row, name) for name in columns] for row in found.join]
    for title, name in (("accuracy", "accuracy"), ("AUC", "auc")):
        if any(getattr(row, name) for row in found.join):
            columns += [f"{title} {kind.replace('_', ' ')}" for kind in kinds]
            for row, shown in zip(found.join, rows, strict=True):
                shown += [getattr(row, name).get(kind) for kind in kinds]
    note = "gain = alone − together. The verdict is by loss; accuracy and AUC are for reading."
    return panels.table("Is joining worth it?", [each.replace("_", " ") for each in columns], rows, note=note)


def _leaving(found: "AuditResult") -> Panel:
    rows = found.without
    note = "The others' loss without the party minus their loss with it: above 0 the party helps, below 0 it hurts."
    return panels.bars(
        "What a party does to the others",
        _who(rows),
        {"": [row.gain for row in rows]},
        low={"": [row.low for row in rows]},
        high={"": [row.high for row in rows]},
        marks=[row.verdict for row in rows],
        y_label="loss without − with",
        note=note,
    )


def _without_table(found: "AuditResult") -> Panel:
    columns = (*RANKED, "visible", "records")
    rows = [[getattr(row, name) for name in columns] for row in found.without]
    note = "visible: the smallest effect that this test would see in four of five cases."
    return panels.table("What the others gain or lose when a party leaves", columns, rows, note=note)


def _cells(found: "AuditResult") -> Panel:
    names = _who(found.without)
    values = np.full((len(names), len(names)), np.nan)
    marks = [["" for _ in names] for _ in names]
    for cell in found.cells:
        row, column = names.index(cell.leaver), names.index(cell.party)
        values[row, column] = cell.gain
        marks[row][column] = {"helps": "+", "hurts": "−", "cannot say": ""}[cell.verdict]
    note = "Loss without − with. + and − mark what the corrected test claims."
    labels = {"row_label": "leaves", "column_label": "is affected"}
    return panels.heat("Who leaves × who is affected", names, names, values, marks=marks, note=note, **labels)


def _shares(found: "AuditResult") -> Panel:
    names, counts = [each["party"] for each in found.parties], [each["records"] for each in found.parties]
    if found.about["kind"] == "numbers":
        return panels.bars("Records by party", names, {"records": counts}, y_label="records")
    classes = list(found.parties[0]["shares"])
    parts = {str(each): [party["shares"][each] for party in found.parties] for each in classes}
    return panels.shares("Records and label shares by party", names, parts, counts=counts)


def _records(found: "AuditResult") -> list[Panel]:
    made = []
    for party in dict.fromkeys(row.party for row in found.records):
        worst = [row for row in found.records if row.party == party and row.gain < 0][:WORST]
        rows = [[row.file, row.line, row.gain, row.says] for row in worst]
        title = f"Records of {party} that hurt the others most"
        named = any(row.round for row in worst)
        model = "the round that named this party" if named else "all parties not named"
        note = f"First order, at the model of {model}; no test. Only this party would see the table."
        made.append(panels.table(title, ("file", "line", "gain", "in words"), rows, note=note))
    return made


def _limits(found: "AuditResult") -> list[str]:
    visible = [row.visible for row in found.without]
    seen = f"Effects on the others below {min(visible):.2g} to {max(visible):.2g} of loss could not have been seen."
    return [
        "Cannot say is the usual answer on small tables: it means neither harmless nor useless.",
        f"Claims are corrected for many comparisons (Benjamini and Yekutieli, level {found.about['level']:g}), "
        "separately for gains by joining, effects on all others, and effects on single parties.",
        "Intervals treat the trained models as fixed, and folds share training data. So intervals are somewhat narrow.",
        f"Models without a party are {_steps(found)}. The leaver's own loss is never counted.",
        seen,
        "A party with 5 to 7 % of the records is not detected this way, even if all its labels are wrong. If 30 to "
        "40 % of one party's labels are wrong at random, they hardly hurt the others, and are not found either.",
        f"Effects use the L2 rate {found.about['fixed_l2']:g}. "
        + ("Joining uses rates chosen by inner folds." if found.about["l2"] is None else "So does joining."),
    ]


def _steps(found: "AuditResult") -> str:
    """Return a phrase that says how models without a party are trained."""
    count = found.about["newton_steps"]
    if not count:
        return "trained to the solution"
    steps = "one Newton step" if count == 1 else f"{count} inexact Newton steps"
    also = "" if found.about["l2"] is None else "; so are those for what a party gets without contributing"
    return f"{steps} from the shared model{also}"


def _learned() -> list[str]:
    return [
        "In a run among real parties, all learn numbers of records, and sums, counts and squares of each column.",
        "They also learn the sums of costs, gradients and Hessians by which models are trained, and the models.",
        "For each leaver they learn sums over the others of losses, of loss differences and of their squares.",
        "Everything else stays with the party that it concerns: its rows and losses, the effects of each other party "
        "on it, and the scores of its records.",
        "Vectors are not protected: a party that forwards sums in the tree sees its children's.",
    ]


def finite(value: Any) -> Any:
    """Return plain lists, dicts and finite numbers for JSON; None for numbers that are not finite."""
    if isinstance(value, Mapping):
        return {str(key): finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return panels.plain(value)


def _who(rows: Sequence[Any]) -> list[str]:
    return [row.party for row in rows]


def _names(found: "AuditResult") -> list[str]:
    return [each["party"] for each in found.parties]


def _list(names: Sequence[str]) -> str:
    return ", ".join(names) if names else "nobody"


def _bytes(count: float) -> str:
    for unit in ("bytes", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"
