"""Name harmful parties, one at a time."""

from collections.abc import Sequence

import numpy as np

from hyperpush.audits.leaving import judge_leavers
from hyperpush.audits.result import Named
from hyperpush.audits.rounds import AuditRounds
from hyperpush.audits.verdicts import Tests


def name_harmful(rounds: AuditRounds, first: Tests, names: Sequence[str], level: float) -> list[Named]:
    """Name the party that hurts most, leave it out, and audit the remaining parties again.

    This ends when no party hurts the others, or when two parties are left. A party with wrong labels gains when an
    honest party leaves. So honest parties look harmful until the party with wrong labels is left out.
    """
    left, counts, tests, named = list(rounds.parties), np.zeros(rounds.clients), first, []
    counts[left] = 1
    while len(left) > 2:
        harmful = [place for place, verdict in enumerate(tests.verdicts) if verdict == "hurts"]
        if not harmful:
            break
        worst = min(harmful, key=lambda place: tests.gain[place])
        numbers = {name: value for name, value in tests.row(worst).items() if name != "verdict"}
        named.append(Named(len(named) + 1, names[left[worst]], **numbers))
        counts[left.pop(worst)] = 0
        if len(left) > 2:
            tests, _ = judge_leavers(rounds, rounds.again(counts), left, level)
    return named
