"""Plan the runs (trainings) of an audit's round: their training records, L2 rates and reference runs."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from hyperpush.audits.splits import ALL, INNER
from hyperpush.tables.fit import RATES

NOBODY = -1  # in place of the number of a leaving party: no party leaves


class PlannedRun(NamedTuple):
    """One training of a model in an audit.

    Attributes:
        fold: The fold that is held out.
        leaver: The party whose records do not count; −1: all count.
        rate: The L2 rate.
        inner: The inner fold that is tested instead of `fold`, for choosing L2; −1: none.
        against: Number of the run that this run is compared with; it comes earlier in the same program. −1: none.
    """

    fold: int
    leaver: int
    rate: float
    inner: int = ALL
    against: int = -1


class Plan(eqx.Module):
    """The runs of a program as arrays, the same at every party.

    Args:
        fold: The fold of each run.
        inner: The inner fold of each run.
        leaver: The party that leaves in each run; −1: none.
        rate: The L2 rate of each run.
        against: The reference run of each run.
        group: The position of each run's (fold, inner) pair in the next two arrays. Runs of a group scale columns
            alike.
        group_fold: The fold of each group.
        group_inner: The inner fold of each group.
        counts: 1 for parties whose records count, 0 for those that are too small or were named.
    """

    fold: Int[Array, "*n k"]
    inner: Int[Array, "*n k"]
    leaver: Int[Array, "*n k"]
    rate: Float[Array, "*n k"]
    against: Int[Array, "*n k"]
    group: Int[Array, "*n k"]
    group_fold: Int[Array, "*n g"]
    group_inner: Int[Array, "*n g"]
    counts: Float[Array, "*n parties"]


def compare_runs(folds: int, leavers: Sequence[int], rate: float) -> tuple[list[PlannedRun], list[PlannedRun]]:
    """Return, for each fold, the run with all parties, and the runs without each leaver that are compared with it."""
    together = [PlannedRun(fold, NOBODY, rate) for fold in range(folds)]
    return together, [PlannedRun(fold, leaver, rate, against=fold) for fold in range(folds) for leaver in leavers]


def rate_runs(folds: int, leavers: Sequence[int], fixed: float) -> list[PlannedRun]:
    """Return all runs for choosing the L2 rate, per fold, leaver and rate: on inner folds, then without inner folds.

    Args:
        folds: Number of outer folds.
        leavers: Parties that leave in turn; −1 for none.
        fixed: The rate for which `compare_runs` already has the runs without inner folds.
    """
    keys = itertools.product(range(folds), leavers, RATES, [*range(INNER), ALL])
    return [PlannedRun(*key) for key in keys if key[2:] != (fixed, ALL)]


def make_plan(runs: Sequence[PlannedRun], counts: np.ndarray, clients: int) -> Plan:
    """Return the runs as arrays, with equal copies for all parties on axis 0."""
    groups = sorted({(run.fold, run.inner) for run in runs})
    columns = {name: np.array([getattr(run, name) for run in runs]) for name in PlannedRun._fields}
    columns["against"] = np.where(columns["against"] < 0, np.arange(len(runs)), columns["against"])
    plan = {
        **columns,
        "group": np.array([groups.index((run.fold, run.inner)) for run in runs]),
        "group_fold": np.array([fold for fold, _ in groups]),
        "group_inner": np.array([inner for _, inner in groups]),
        "counts": np.asarray(counts, float),
    }
    return Plan(**{name: jnp.asarray(np.repeat(each[None], clients, axis=0)) for name, each in plan.items()})
