"""Report of the first run: names of methods, comparison over seeds, tables and a summary sentence."""

from typing import Any

import numpy as np
from jaxtyping import Float

from hyperpush import influence
from hyperpush.runs.run import StudyRun
from hyperpush_papers.quickstart.config import Quickstart

ROUNDS = 3  # repetitions of filtering and training

AS_IS = "data as they are"
TRUSTED = "trusted data alone"
LOUDER = "trusted data count twice as much as all others"
TUNED = "shared model, tuned on trusted data"
ALONE = "everyone alone"
FILTERS = (
    f"drop what the shared model contradicts, {ROUNDS} rounds",
    f"drop what a trusted model contradicts, {ROUNDS} rounds",
    "drop parties that a trusted model mostly contradicts",
)
LEAVE_ONE_OUT = "retrain without each party, drop whom it helps"
ALIGNED = "drop parties whose gradient opposes trusted data's"
ESTIMATE = "one estimate, {} terms: drop parties"
BY_RECORD = "one estimate, {} terms: drop records"
LEARNED = {"party": "learned weights, one per party", "record": "learned weights, one per record"}
WON = LEARNED["party"]
HARMLESS = "harmless parties' data only (nobody knows)"
RIGHT = "right labels only (nobody knows)"

ONE_SEED = f" One seed is one draw: over ten (docs/results/first-run.md), {LEAVE_ONE_OUT!r} was not beaten."
REMOVED = ("parties", "records")
Row = dict[str, Any]


def agreement(predicted: Float[np.ndarray, " k"], real: Float[np.ndarray, " k"]) -> Row:
    """Return R² of predicted against real changes, the share of right signs, and the pairs of changes."""
    signs = float(np.mean((predicted < 0) == (real < 0)))
    return {
        "r2": influence.agreement(predicted, real)["r2"],
        "signs": signs,
        "predicted": predicted.tolist(),
        "real": real.tolist(),
    }


def compare(rows: list[Row]) -> list[Row]:
    """Return a row per method, worst first: means over seeds, and the learned weights' lead in standard errors."""
    by_method: dict[str, list[Row]] = {}
    for row in rows:
        by_method.setdefault(row["method"], []).append(row)
    won = np.array([row["accuracy"] for row in by_method[WON]])
    found = []
    for method, own in by_method.items():
        ahead = won - np.array([row["accuracy"] for row in own])
        error = float(np.std(ahead, ddof=1) / np.sqrt(len(ahead))) if len(ahead) > 1 else None
        means = {name: float(np.mean([row[name] for row in own])) for name in ("accuracy", "kept", "floats_per_client")}
        found.append(
            {"method": method, "group": own[0]["group"], **means, "trainings": own[0]["trainings"], "seeds": len(own)}
            | {
                "ahead": float(np.mean(ahead)),
                "standard_error": error,
                "status": _worst([row["status"] for row in own]),
            }
        )
    return sorted(found, key=lambda row: row["accuracy"])


def _worst(statuses: list[str]) -> str:
    """Return the status of a seed that did not converge, or of the first seed if all converged."""
    return max(statuses, key=lambda status: status.startswith("!"))


def beaten(row: Row) -> bool:
    """Return True if the learned weights beat a method by over two standard errors, or at all if there is one seed."""
    return row["ahead"] > 2 * (row["standard_error"] or 0)


def sentence(compared: list[Row], removals: list[Row], measured: bool = True) -> str:
    """Describe the gain, the controls that were not beaten, and equally good controls.

    `measured` is True if our results over ten seeds are for this task.
    """
    found = {row["method"]: row for row in compared}
    won, before, bound = (100 * found[name]["accuracy"] for name in (WON, AS_IS, HARMLESS))
    controls = [row for row in compared if row["group"] == "control"]
    margin = " by more than two standard errors" * (len(removals) > 1)
    lost = _list_unbeaten(controls)
    count = f"{len(controls) - len(lost)} of {len(controls)}" if lost else f"all {len(controls)}"
    verdict = f"ahead of {count} controls{margin}" + (f", but not of {', '.join(lost)}" if lost else "") + "."
    verdict += ONE_SEED * (measured and len(removals) == 1)
    others = _list_unbeaten([row for row in compared if row["group"] == "hypergradient" and row["method"] != WON])
    also = f" Without learning, as good or better: {', '.join(others)}." if others else ""
    closed = f", {100 * (won - before) / (bound - before):.0f} % of the way" if bound > before and won > before else ""
    r2, signs = ([_mean([each[of][name] for each in removals]) for of in REMOVED] for name in ("r2", "signs"))
    return (
        f"Dropping the parties whose learned weight ends below ½ takes the mean test accuracy from {before:.1f} to "
        f"{won:.1f} %; harmless data alone reach {bound:.1f} %{closed}. That is {verdict}{also} One estimate "
        f"predicted what retraining without a party or a record did: R² {_show_r2(r2[0])} and {_show_r2(r2[1])}, "
        f"{100 * signs[0]:.0f} and {100 * signs[1]:.0f} % right signs."
    )


def _list_unbeaten(rows: list[Row]) -> list[str]:
    return [f"{row['method']!r} ({100 * row['accuracy']:.1f} %)" for row in rows if not beaten(row)]


def _show_r2(r2: float) -> str:
    return "below 0" if r2 < 0 else f"{r2:.2f}"


def _mean(values: list[float | None]) -> float:
    """Return the mean of the values that are defined; R² of fewer than two removals is not."""
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else float("nan")


def show(run: StudyRun, config: Quickstart, compared: list[Row], removals: list[Row]) -> None:
    """Show the tables of the first run."""
    several = config.seeds > 1
    columns = ["", "test, %", "trained", "sent, M", "status"]
    rows = [
        [
            row["method"] + " *" * (row["group"] == "control"),
            f"{100 * row['accuracy']:.1f}",
            row["trainings"],
            f"{row['floats_per_client'] / 1e6:.1f}",
            row["status"],
        ]
        for row in compared
    ]
    if several:
        columns.append("ahead by")
        for line, row in zip(rows, compared, strict=True):
            line.append(f"{100 * row['ahead']:+.1f} ± {100 * row['standard_error']:.1f}")
    seeds = f"{config.seeds} seeds" if several else f"seed {config.seed}"
    n, shifted, marked = config.parties, config.shifted, config.marked
    title = f"{n} parties, {shifted} shift labels, {marked} mark images; {seeds}; *: controls; sent: millions of floats"
    run.table(title, columns, rows)
    lines = [
        (of, len(each[of]["real"]), each["seed"], each[of]["r2"], 100 * each[of]["signs"])
        for each in removals
        for of in REMOVED
    ]
    run.table("predicted against retraining", ("removed", "how many", "seed", "R²", "right signs, %"), lines)
