"""Assign records to sets at random, so that every set has about the same share of each class."""

from collections.abc import Sequence

import numpy as np


def deal(labels: np.ndarray, shares: Sequence[float], generator: np.random.Generator) -> np.ndarray:
    """Return the number of each record's set: set k gets the share `shares[k]` of all records and of each class.

    Records with numeric labels are assigned in the order of their labels, so that every set has small and large ones.

    Args:
        labels: One label per record.
        shares: The share of each set; shares sum to 1. With at least one record per set, all sets get records.
        generator: Random generator that assigns the records.
    """
    order = np.lexsort((generator.random(len(labels)), labels))
    counts, found = np.zeros(len(shares)), np.zeros(len(labels), int)
    tilt = 1e-9 * generator.permutation(len(shares))  # random order of equal sets
    for done, record in enumerate(order, 1):
        found[record] = np.argmax(np.asarray(shares) * done - counts + tilt)
        counts[found[record]] += 1
    for empty in np.nonzero((counts == 0) & (np.asarray(shares) > 0))[0]:
        richest = int(np.argmax(counts))
        if counts[richest] > 1:
            found[np.nonzero(found == richest)[0][0]] = empty
            counts[[richest, empty]] += [-1, 1]
    return found
