"""Pad each party's records to one shape, and assign them to folds, which decide the runs that train on them."""

from collections.abc import Sequence

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from hyperpush.tables.read import Tables
from hyperpush.tables.split import deal

INNER = 3  # number of folds within a training part, for choosing L2
ALL = -1  # number of a fold without records: a training that holds it out uses all records


class Records(eqx.Module):
    """One party's records, which are never sent.

    Args:
        values: Features, 0 where a value is missing.
        present: 1 where a value is present, else 0.
        labels: The number of each record's class, or the numeric label.
        fold: The fold of each record; below −1 for padding.
        inner: The inner fold of each record; below −1 for padding.
    """

    values: Float[Array, "*n m width"]
    present: Float[Array, "*n m width"]
    labels: Float[Array, "*n m"]
    fold: Int[Array, "*n m"]
    inner: Int[Array, "*n m"]


PADDING = -2


def split_records(tables: Tables, folds: int, generator: np.random.Generator) -> Records:
    """Return all parties' records, [parties, records], assigned to folds with equal shares of each class."""
    most = max(tables.counts)
    outer = [deal(labels, [1 / folds] * folds, generator) for labels in tables.labels]
    inner = [_deal_within(labels, fold, generator) for labels, fold in zip(tables.labels, outer, strict=True)]
    values = _pad(tables.inputs, most, np.nan)
    present = ~np.isnan(values)
    return Records(
        jnp.asarray(np.where(present, values, 0), float),
        jnp.asarray(present, float),
        jnp.asarray(_pad(tables.labels, most, 0), float),
        jnp.asarray(_pad(outer, most, PADDING)),
        jnp.asarray(_pad(inner, most, PADDING)),
    )


def _deal_within(labels: np.ndarray, fold: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Assign the records of each fold to inner folds, so that inner folds have equal sizes in any union of folds."""
    found = np.zeros(len(labels), int)
    for number in np.unique(fold):
        own = np.nonzero(fold == number)[0]
        found[own] = (deal(labels[own], [1 / INNER] * INNER, generator) + generator.integers(INNER)) % INNER
    return found


def _pad(parts: Sequence[np.ndarray], most: int, fill: float) -> np.ndarray:
    return np.stack(
        [np.pad(own, [(0, most - len(own)), *[(0, 0)] * (own.ndim - 1)], constant_values=fill) for own in parts]
    )
