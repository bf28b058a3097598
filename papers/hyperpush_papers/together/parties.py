"""Parties in clusters that a graph shows; some parties have wrong labels."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

import hyperpush as hp
from hyperpush.base.errors import InvalidInput
from hyperpush.personalize import MTL, Clean, Product
from hyperpush_papers.common.data.sources import load
from hyperpush_papers.common.models.dense import MLP

CLUSTERS = 2  # party i is in cluster i mod 2, and turns its images by i mod 2 quarter turns
L2 = 1e-3
LARGEST = 16  # pixels on a side; larger images are halved, so that the step sizes for scikit-learn's digits fit
DROPPED = -30.0  # log weight of a dropped example in the recipe Clean: a weight of 2e-13
Examples = tuple[Float[np.ndarray, "n m side side"], Int[np.ndarray, "n m"]]


class Parties(NamedTuple):
    """Examples of all parties."""

    train: Examples  # with their original labels
    trusted: Examples
    test: Examples
    wrong: Bool[np.ndarray, "n m"]  # True for wrong training labels
    model: MLP

    @property
    def clusters(self) -> list[tuple[int, int]]:
        """Return the graph: a link between any two parties of one cluster."""
        n = len(self.wrong)
        return [(u, v) for u in range(n) for v in range(u + 1, n) if (v - u) % CLUSTERS == 0]

    @property
    def rewired(self) -> list[tuple[int, int]]:
        """Return a graph with as many links, each between parties of different clusters."""
        n = len(self.wrong)
        others = [(u, v) for u in range(n) for v in range(u + 1, n) if (v - u) % CLUSTERS]
        chosen = np.random.default_rng(0).permutation(len(others))[: len(self.clusters)]
        return [others[place] for place in sorted(chosen)]


def deal(
    parties: int, seed: int, *, examples: int = 40, trusted: int = 5, test: int = 60, mislabel: float = 0.9,
    data: str = "digits",
) -> Parties:  # fmt: skip
    """Divide digits among parties; half of the parties label a share `mislabel` of their training examples y + 1."""
    found, generator, each = load(data), np.random.default_rng(seed), examples + trusted + test
    chosen = generator.permutation(np.flatnonzero(found.labels < 10))
    if parties * each > len(chosen):
        sizes = {"examples": examples, "trusted": trusted, "test": test}
        field = max(sizes, key=lambda name: sizes[name])
        most = len(chosen) // parties - each + sizes[field]
        if most < 1:  # a smaller set would not suffice
            field, most = "parties", len(chosen) // each
        counted = f"{data} has {len(chosen)} digits for {parties} parties with {each} each"
        raise InvalidInput(field, {**sizes, "parties": parties}[field], f"at most {most}: {counted}")
    digits, rows = found.rows(chosen[: parties * each]), np.arange(parties * each).reshape(parties, each)
    upright = shrink(digits.inputs) if digits.inputs.shape[-1] > LARGEST else digits.inputs
    images = np.stack([np.rot90(upright[own], i % CLUSTERS, axes=(1, 2)) for i, own in enumerate(rows)])
    labels = digits.labels[rows].astype(np.int32)
    wrong = generator.random((parties, examples)) < mislabel
    wrong &= (np.arange(parties) // CLUSTERS % 2 == 1)[:, None]
    train, rest, last = (slice(examples), slice(examples, examples + trusted), slice(examples + trusted, each))
    taught = np.where(wrong, (labels[:, train] + 1) % 10, labels[:, train])
    return Parties(
        train=(images[:, train], taught),
        trusted=(images[:, rest], labels[:, rest]),
        test=(images[:, last], labels[:, last]),
        wrong=wrong,
        model=MLP(images[0, 0].size, 10),
    )


def shrink(images: Float[np.ndarray, "*many side side"], block: int = 2) -> Float[np.ndarray, "*many small small"]:
    """Shrink images by averaging blocks of this size in pixels."""
    small = images.shape[-1] // block
    cut = images[..., : small * block, : small * block]
    return cut.reshape(*images.shape[:-2], small, block, small, block).mean((-3, -1))


def joined(
    clients: int, seed: int, examples: int = 40, trusted: int = 5, test: int = 60, models: int = CLUSTERS,
    l2: float = L2,
) -> hp.Task:  # fmt: skip
    """Return the task with a mixture of shared models per party, and a weight for every training example."""
    made = deal(clients, seed, examples=examples, trusted=trusted, test=test)
    recipes = Product([MTL(models=models), Clean()])
    return recipes.task(
        made.model, train=made.train, validation=made.trusted, test=made.test, key=seed, l2=l2, classes=10
    )


def auc(scores: np.ndarray, wrong: np.ndarray) -> float | None:
    """Return the probability that a wrong item has a lower score than a right item; None if one kind is missing."""
    low, high = scores[wrong], scores[~wrong]
    if not len(low) or not len(high):
        return None
    return float(np.mean((low[:, None] < high) + 0.5 * (low[:, None] == high)))
