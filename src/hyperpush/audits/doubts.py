"""Find an audit's warnings: rare classes, constant columns, different label shares, poor models, unsolved trainings."""

from collections.abc import Sequence

import numpy as np

from hyperpush.audits.rounds import AuditRounds
from hyperpush.base.status import Status
from hyperpush.tables.read import Tables
from hyperpush.tables.scaling import constant_features

FEW = 10  # records of a class below which a party's losses on it are unreliable
APART = 0.2  # difference between parties' label shares from which a warning is given


def find_doubts(tables: Tables, rounds: AuditRounds, together: Sequence[float], status: Status) -> list[str]:
    """Return the warnings of an audit.

    Args:
        tables: All records.
        rounds: The rounds of the audit, with its parties and folds.
        together: Mean loss under the shared model of each party that takes part.
        status: The status of all trainings.
    """
    parties = rounds.parties
    said = [*_classes(tables, parties)] if tables.schema.classes else []
    if names := _constant_in_training(tables, rounds):
        said.append(f"Constant in the training records of a fold and therefore left out there: {', '.join(names)}.")
    for place, party in enumerate(parties):
        folds = np.asarray(rounds.records.fold[party])[: tables.counts[party]]
        constant = constant_loss(tables, party, folds)
        if constant < together[place]:
            said.append(
                f"A constant answer beats the model at {tables.names[party]}: loss {constant:.3g} instead of "
                f"{together[place]:.3g}."
            )
    if status.converged is False:
        said.append(f"Some params are not an optimum ({status.reason}, {status.failed} of {status.runs} trainings).")
    return said


def constant_loss(tables: Tables, party: int, folds: np.ndarray) -> float:
    """Return a party's mean held-out loss if a constant is predicted for each fold.

    The constant is the class shares, or the mean of the numbers, in the party's other folds.
    """
    labels, losses = tables.labels[party], np.zeros(len(folds))
    size = len(tables.schema.classes)
    for fold in np.unique(folds):
        held, rest = folds == fold, labels[folds != fold]
        if not size:
            losses[held] = (labels[held] - rest.mean()) ** 2
            continue
        # One more record of each class makes all shares positive.
        shares = (np.bincount(rest, minlength=size) + 1) / (len(rest) + size)
        losses[held] = -np.log(shares[labels[held]])
    return float(losses.mean())


def _constant_in_training(tables: Tables, rounds: AuditRounds) -> list[str]:
    """Return features that vary over all records, but not in the training records of some fold."""
    own = np.concatenate([tables.inputs[party] for party in rounds.parties])
    fold = np.concatenate([np.asarray(rounds.records.fold[party])[: tables.counts[party]] for party in rounds.parties])
    some = np.any([constant_features(own[fold != held]) for held in range(rounds.folds)], axis=0)
    never = constant_features(np.concatenate(tables.inputs))
    return [name for name, left in zip(tables.schema.features, some & ~never, strict=True) if left]


def _classes(tables: Tables, parties: Sequence[int]) -> list[str]:
    said, shares = [], tables.shares[list(parties)]
    for party, own in zip(parties, shares, strict=True):
        few = [
            f"{round(share * tables.counts[party])} of class {name}"
            for name, share in zip(tables.schema.classes, own, strict=True)
            if share * tables.counts[party] < FEW
        ]
        if few:
            said.append(f"{tables.names[party]} has few records: {', '.join(few)}.")
    low, high = shares.min(axis=0), shares.max(axis=0)
    widest = int(np.argmax(high - low))
    if np.max(high - low) >= APART:
        name = tables.schema.classes[-1] if len(tables.schema.classes) == 2 else tables.schema.classes[widest]
        place = len(low) - 1 if len(low) == 2 else widest
        said.append(
            f"Label shares differ: class {name} makes up {100 * low[place]:.0f} to {100 * high[place]:.0f} % of the "
            "records of a party."
        )
    return said
