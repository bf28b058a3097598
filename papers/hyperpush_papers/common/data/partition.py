"""Partition examples among clients, and split them into training, validation and test sets.

Every function returns the numbers of each client's examples; nothing is copied until `stack` fills the padded arrays.
All draws come from the given generator.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Float, Int
from numpy.random import Generator

from hyperpush.base import processes
from hyperpush.base.checks import check_integer, check_positive, check_probability
from hyperpush.base.errors import InvalidInput
from hyperpush.data.batches import Ragged
from hyperpush_papers.common.data.sources import Dataset

COARSE, FINE = 0.4, 10.0  # concentrations of Pachinko's two stages
LEAST_STD = 0.25  # of a shift
Owned = list[Int[np.ndarray, " _"]]


class Split(NamedTuple):
    """Numbers of each client's examples, by purpose."""

    train: Owned
    validation: Owned
    test: Owned


class Shift(NamedTuple):
    """Return each client's shift and scale of inputs, and the cluster that it belongs to."""

    cluster: Int[np.ndarray, " n"]
    mean: Float[np.ndarray, " n"]
    std: Float[np.ndarray, " n"]


def iid(examples: int, clients: int, generator: Generator) -> Owned:
    """Return examples shuffled and dealt out; sizes differ by at most one."""
    _enough(examples, clients, 1)
    return np.array_split(generator.permutation(examples), clients)


def dirichlet(
    labels: Int[np.ndarray, " m"], clients: int, concentration: float, generator: Generator, *, least: int = 10
) -> Owned:
    """Return each label's examples in proportions ~ Dirichlet(concentration·1) over the clients, drawn anew for each
    label.

    After Wang, Yurochkin, Sun, Papailiopoulos, Khazaeni 2020.

    Args:
        labels: Labels of all examples.
        clients: Number of clients, at least 1.
        concentration: Above 0. Near 0 a client has few labels; at 100 and more all have nearly the same mixture.
        generator: Random generator of all draws.
        least: Fewest examples of a client; clients with fewer get random examples from the largest client.

    Raises:
        InvalidInput: There are too few examples for this many clients, or an option is out of range.

    Example:
        >>> import numpy as np
        >>> from hyperpush_papers.common.data.partition import dirichlet
        >>> owned = dirichlet(np.repeat([0, 1], 50), 4, 0.4, np.random.default_rng(0))
        >>> sum(map(len, owned)), min(map(len, owned)) >= 10
        (100, True)
    """
    check_positive("concentration", concentration)
    _enough(len(labels), clients, check_integer("least", least, 0))
    parts: list[list[np.ndarray]] = [[] for _ in range(clients)]
    for label in np.unique(labels):
        own = generator.permutation(np.flatnonzero(labels == label))
        ends = np.cumsum(generator.dirichlet(np.full(clients, concentration)))[:-1] * len(own)
        for part, piece in zip(parts, np.split(own, np.round(ends).astype(np.int64)), strict=True):
            part.append(piece)
    owned = [generator.permutation(np.concatenate(part)) for part in parts]
    sizes = np.array([len(own) for own in owned])
    for poor in np.flatnonzero(sizes < least):
        while sizes[poor] < least:
            rich = int(np.argmax(sizes))
            owned[poor], owned[rich] = np.append(owned[poor], owned[rich][-1]), owned[rich][:-1]
            sizes[[poor, rich]] += 1, -1
    return owned


def pachinko(
    coarse: Int[np.ndarray, " m"],
    fine: Int[np.ndarray, " m"],
    clients: int,
    generator: Generator,
) -> Owned:
    """Return equally many examples per client, drawn in two stages: a coarse label, then one of its fine labels.

    Each client draws its distributions over coarse labels, and over the fine labels of each, from symmetric Dirichlet
    distributions. Examples are drawn without replacement; labels without examples left are skipped. Li and McCallum
    2006; Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar, McMahan 2021 (appendix F).
    """
    _enough(len(fine), clients, 1)
    each = len(fine) // clients
    groups = [np.unique(fine[coarse == group]) for group in np.unique(coarse)]
    if sum(map(len, groups)) != len(np.unique(fine)):
        raise InvalidInput("coarse", "a fine label in several coarse ones", "each fine label in one coarse label")
    left = {label: generator.permutation(np.flatnonzero(fine == label)) for group in groups for label in group}
    owned = []
    for _ in range(clients):
        supply = [np.array([len(left[label]) for label in group]) for group in groups]
        chances = generator.dirichlet(np.full(len(groups), COARSE))
        amounts = _draw_amounts(generator, chances, np.array([own.sum() for own in supply]), each)
        taken = []
        for group, own, amount in zip(groups, supply, amounts, strict=True):
            chances = generator.dirichlet(np.full(len(group), FINE))
            for label, number in zip(group, _draw_amounts(generator, chances, own, int(amount)), strict=True):
                taken.append(left[label][:number])
                left[label] = left[label][number:]
        owned.append(generator.permutation(np.concatenate(taken)))
    return owned


def _draw_amounts(
    generator: Generator, chances: Float[np.ndarray, " k"], supply: Int[np.ndarray, " k"], amount: int
) -> Int[np.ndarray, " k"]:
    """Draw counts of k kinds that sum to `amount`, each at most its supply.

    Draws of an empty kind are repeated among the others. These repeats come last, which does not change the
    distribution.
    """
    found = np.zeros_like(supply)
    while (missing := amount - found.sum()) > 0:
        open_ = np.where(found < supply, chances, 0)
        if not open_.sum() > 0:  # only kinds of chance 0 are left
            open_ = (found < supply).astype(float)
        found = np.minimum(found + generator.multinomial(missing, open_ / open_.sum()), supply)
    return found


def split(owned: Owned, generator: Generator, *, test: float = 0.2) -> Split:
    """Split each client's examples at random: a share `test`, and a quarter of the rest for validation.

    Args:
        owned: Numbers of each client's examples.
        generator: Random generator of all draws.
        test: Share of a client's examples, above 0 and below 1; it is at least one example.

    Raises:
        InvalidInput: A client has too few examples for three parts.
    """
    check_probability("test", test)
    parts = []
    for client, own in enumerate(owned):
        last = max(round(test * len(own)), 1)
        middle = max(round((len(own) - last) / 4), 1)
        first = len(own) - last - middle
        if first < 1:
            given = f"{len(own)} examples ({first} / {middle} / {last})"
            raise InvalidInput(f"data of client {client}", given, "enough for training, validation and testing")
        parts.append(np.split(generator.permutation(own), [first, first + middle]))
    return Split(*(list(part) for part in zip(*parts, strict=True)))


def shifts(clients: int, clusters: int, generator: Generator) -> Shift:
    """Return clusters of clients of nearly equal size, each with its own mean ~ U(0, 1) and std ~ U(¼, 1).

    The paper draws the std from U(0, 1); near 0 it scales inputs until training diverges.
    Terashita and Hara, "Decentralized hyper-gradient computation over time-varying directed networks".
    """
    check_integer("clients", clients, 1)
    check_integer("clusters", clusters, 1, clients)
    cluster = generator.permutation(np.arange(clients) % clusters)
    means, stds = generator.uniform(0, 1, clusters), generator.uniform(LEAST_STD, 1, clusters)
    return Shift(cluster, means[cluster], stds[cluster])


def counts(labels: Int[np.ndarray, " m"], classes: int, owned: Owned) -> Int[np.ndarray, "n classes"]:
    """Return the number of examples by client and label."""
    return np.stack([np.bincount(labels[own], minlength=classes) for own in owned])


def _enough(examples: int, clients: int, least: int) -> None:
    check_integer("clients", clients, 1)
    if clients * max(least, 1) > examples:
        most = examples // max(least, 1)
        raise InvalidInput("clients", clients, f"at most {most}: {examples} examples, at least {max(least, 1)} each")


def stack(
    data: Dataset, owned: Sequence[Int[np.ndarray, " _"]], shift: Shift | None = None, spread: bool = False
) -> Ragged:
    """Examples (inputs, labels) of all clients, copied once: from the dataset into the padded arrays that JAX keeps.

    With `shift`, inputs become (input − mean)/std of their client; padding stays 0. With `spread` each of several
    processes copies its own clients' examples only.
    """
    sizes = np.array([len(own) for own in owned])
    if not np.all(sizes):
        empty = int(np.argmin(sizes))
        raise InvalidInput(f"data of client {empty}", "0 examples", "at least 1 example per client")

    def block(first: int, end: int) -> Any:
        def pad(array: np.ndarray) -> np.ndarray:
            out = _aligned_zeros((end - first, int(sizes.max()), *array.shape[1:]), array.dtype)
            for row, own in zip(out, owned[first:end], strict=True):
                np.take(array, own, axis=0, out=row[: len(own)], mode="clip")  # the default mode fills a copy first
            return out

        inputs = pad(data.inputs)
        if shift is not None:
            for row, client in zip(inputs, range(first, end), strict=True):
                row[: sizes[client]] -= shift.mean[client]
                row[: sizes[client]] /= shift.std[client]
        return inputs, pad(data.labels), sizes[first:end]

    apart = spread and processes.count() > 1 and len(owned) % jax.device_count() == 0
    made = processes.stack_blocks(block, len(owned)) if apart else jax.device_put(block(0, len(owned)))
    return Ragged(made[:2], made[2])


def _aligned_zeros(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Zeros that begin at a multiple of 64 bytes: JAX takes such memory over on CPUs instead of copying it."""
    size = int(np.prod(shape)) * dtype.itemsize
    memory = np.zeros(size + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + size].view(dtype).reshape(shape)
