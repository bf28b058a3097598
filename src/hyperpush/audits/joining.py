"""Compare each party's losses under its own model, the shared model, and the model of all other parties."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from hyperpush.audits.plan import NOBODY
from hyperpush.audits.result import Join
from hyperpush.audits.rounds import AuditRounds, Found
from hyperpush.audits.verdicts import area_under_curve, judge
from hyperpush.tables.read import Tables


@dataclass(frozen=True)
class HeldOut:
    """Results for one party's records, each under the model of the fold that held the record out."""

    loss: np.ndarray
    score: np.ndarray
    right: np.ndarray

    @staticmethod
    def of(found: Found, runs: list[int], party: int, count: int) -> "HeldOut":
        """Return the results of a party from the runs of all folds, as a sum: they are 0 outside of held-out folds."""
        loss, score, right = (each[runs, party].sum(0)[:count] for each in (found.loss, found.score, found.right))
        return HeldOut(loss, score, right)


def join_rows(tables: Tables, rounds: AuditRounds, found: Found, alone: Found, level: float) -> tuple[Join, ...]:
    """Return a row of results per party; p-values are corrected for the number of parties."""
    held = [_held(tables, rounds, found, alone, party) for party in rounds.parties]
    gains = [each["alone"].loss - each["together"].loss for each in held]
    sums = np.array([(gain.sum(), gain @ gain, len(gain)) for gain in gains])
    tests = judge(sums, level, unit=float(np.mean([each["together"].loss.mean() for each in held])))
    return tuple(
        Join(
            tables.names[party],
            len(gains[place]),
            **{name: float(each.loss.mean()) for name, each in held[place].items()},
            **tests.row(place),
            accuracy=_accuracy(tables, held[place]),
            auc=_area(tables, rounds, held[place], party),
        )
        for place, party in enumerate(rounds.parties)
    )


def _held(tables: Tables, rounds: AuditRounds, found: Found, alone: Found, party: int) -> dict[str, HeldOut]:
    """Return one party's results under its own model, the shared model, and the model of all other parties."""
    count = tables.counts[party]
    return {
        "alone": HeldOut.of(alone, alone.best(rounds.folds, NOBODY, rounds.l2, party), party, count),
        "together": HeldOut.of(found, found.best(rounds.folds, NOBODY, rounds.l2), party, count),
        "not_contributing": HeldOut.of(found, found.best(rounds.folds, party, rounds.l2), party, count),
    }


def _accuracy(tables: Tables, held: Mapping[str, HeldOut]) -> dict[str, float]:
    if not tables.schema.classes:
        return {}
    return {name: float(each.right.mean()) for name, each in held.items()}


def _area(tables: Tables, rounds: AuditRounds, held: Mapping[str, HeldOut], party: int) -> dict[str, float | None]:
    """Return, by model, the mean area under the ROC curve over folds with both classes."""
    if len(tables.schema.classes) != 2:
        return {}
    labels, found = tables.labels[party], {}
    folds = np.asarray(rounds.records.fold[party])[: len(labels)]
    for name, each in held.items():
        areas = [area_under_curve(each.score[folds == fold], labels[folds == fold]) for fold in np.unique(folds)]
        known = [area for area in areas if area is not None]
        found[name] = float(np.mean(known)) if known else None
    return found
