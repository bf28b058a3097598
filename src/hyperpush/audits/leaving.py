"""Test the gains and losses of the other parties, in total and one by one, when a party leaves."""

from collections.abc import Sequence

import numpy as np

from hyperpush.audits.plan import NOBODY
from hyperpush.audits.result import Cell, Without
from hyperpush.audits.rounds import AuditRounds, Found
from hyperpush.audits.verdicts import Tests, judge
from hyperpush.tables.read import Tables


def judge_leavers(rounds: AuditRounds, found: Found, parties: Sequence[int], level: float) -> tuple[Tests, np.ndarray]:
    """Test the others' total gain from each party, and return the tests and the numbers of held-out records.

    The tests use only the sums over parties that the program has shared.
    """
    folds = range(rounds.folds)
    sums = np.array([found.sums[[found.at(fold, who, rounds.fixed) for fold in folds]].sum(0) for who in parties])
    records = sums[:, 4]
    return judge(sums[:, 2:], level, unit=float(sums[:, 0].sum() / records.sum())), records.astype(int)


def without_rows(tables: Tables, rounds: AuditRounds, found: Found, level: float) -> tuple[Without, ...]:
    """Return a row per leaving party; p-values are corrected for the number of leaving parties."""
    tests, records = judge_leavers(rounds, found, rounds.parties, level)
    return tuple(
        Without(tables.names[party], int(records[place]), **tests.row(place), visible=float(tests.visible[place]))
        for place, party in enumerate(rounds.parties)
    )


def cell_rows(tables: Tables, rounds: AuditRounds, found: Found, level: float) -> tuple[Cell, ...]:
    """Return a row per pair of a leaving and an affected party; p-values are corrected for the number of pairs.

    Among real parties, each affected party would compute its own rows.
    """
    folds, parties = range(rounds.folds), rounds.parties
    loss = {who: found.loss[[found.at(fold, who, rounds.fixed) for fold in folds]].sum(0) for who in (NOBODY, *parties)}
    pairs = [(leaver, party) for leaver in parties for party in parties if party != leaver]
    gains = [(loss[leaver][party] - loss[NOBODY][party])[: tables.counts[party]] for leaver, party in pairs]
    sums = np.array([(gain.sum(), gain @ gain, len(gain)) for gain in gains])
    unit = float(np.mean([loss[NOBODY][party][: tables.counts[party]].mean() for party in parties]))
    tests = judge(sums, level, unit)
    return tuple(
        Cell(tables.names[leaver], tables.names[party], len(gains[place]), **tests.row(place))
        for place, (leaver, party) in enumerate(pairs)
    )
