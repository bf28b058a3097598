"""Scenarios: a data set partitioned among clients, and its model."""

from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int, PyTree
from numpy.random import Generator

from hyperpush.base.errors import InvalidInput
from hyperpush.personalize.model import Model
from hyperpush_papers.common.data import partition, shakespeare, sources
from hyperpush_papers.common.data.partition import Shift, Split
from hyperpush_papers.common.data.sources import Dataset
from hyperpush_papers.common.models.cnn import CNN
from hyperpush_papers.common.models.cnn import EMNIST as EMNIST_CNN
from hyperpush_papers.common.models.dense import MLP
from hyperpush_papers.common.models.lstm import LSTM, SHAKESPEARE
from hyperpush_papers.common.models.mobilenet import MobileNetV2

CLUSTERS = 3  # number of clusters of clients, for images of characters
CONCENTRATION = 0.4  # α of the Dirichlet distribution of labels; after Marfoq, Neglia, Bellet, Kameni, Vidal 2021
_SMALL_CNN = {"channels": (16, 32), "hidden": (128,), "size": 32, "kernel": 3, "colors": 3}
MODELS: dict[str, tuple[Model, Model]] = {  # for each data set a small model, and the papers' model
    "digits": (MLP(64, 10), MLP(64, 10, (32,))),
    "emnist": (CNN(channels=(8, 16), hidden=(128,), classes=62, kernel=3), EMNIST_CNN),
    "cifar10": (CNN(**_SMALL_CNN, classes=10), MobileNetV2(10)),
    "cifar100": (CNN(**_SMALL_CNN, classes=100), MobileNetV2(100)),
    "shakespeare": (LSTM(classes=len(shakespeare.CHARACTERS), hidden=64), SHAKESPEARE),
}


class Scenario(NamedTuple):
    """Every client's examples for training, validation and testing."""

    data: Dataset
    split: Split
    shift: Shift | None
    cluster: Int[np.ndarray, " n"] | None  # the true cluster of each client; None without clusters
    model: Model
    train: PyTree
    validation: PyTree
    test: PyTree

    def label_counts(self) -> Int[np.ndarray, "n classes"]:
        """Return the number of examples by client and label, over all sets."""
        owned = [np.concatenate(own) for own in zip(*self.split, strict=True)]
        return partition.counts(self.data.labels, self.data.classes, owned)

    def label_shares(self) -> Float[np.ndarray, "n classes"]:
        """Return each label's share of the training examples, by client."""
        owned = partition.counts(self.data.labels, self.data.classes, self.split.train)
        return owned / owned.sum(1, keepdims=True)

    def cut_weights(self, of: str, weights: Float[np.ndarray, "n k"]) -> list[Float[np.ndarray, " _"]]:
        """Return a list of each client's weights; for weights of examples, without the padding of shorter clients."""
        counts = [len(own) for own in self.split.train]
        return [row[:count] if of == "examples" else row for row, count in zip(weights, counts, strict=True)]

    def describe(self) -> dict[str, Any]:
        """Return numbers that describe the clients' data."""
        by_label = self.label_counts()
        found: dict[str, Any] = {
            "data": self.data.name,
            "note": self.data.note,
            "clients": len(by_label),
            **{part: [len(own) for own in owned] for part, owned in self.split._asdict().items()},
            "labels": np.count_nonzero(by_label, axis=1).tolist(),
            "commonest_label": (by_label.max(1) / by_label.sum(1)).tolist(),
        }
        if self.shift is not None:
            found |= {name: values.tolist() for name, values in self.shift._asdict().items()}
        if self.cluster is not None:
            found["cluster"] = self.cluster.tolist()
        return found


def scenario(
    name: str, clients: int, seed: int, *, examples: int | None = None, large: bool = False, clusters: bool = True
) -> Scenario:
    """Divide a data set among `clients`: `examples` random examples of it (None: all).

    - digits: labels ~ Dirichlet(5). Three clusters of clients turn their images by 0, 1 and 2 quarter turns (after
      Ghosh, Chung, Yin, Ramchandran 2020).
    - emnist: labels ~ Dirichlet(0.4). Three clusters normalize inputs with different mean and std, unless `clusters`
      is False.
    - cifar10: labels ~ Dirichlet(0.4).
    - cifar100: Pachinko.
    - shakespeare: one speaking role per client, lines in order of time.
    """
    generator = np.random.default_rng(seed)
    shift = cluster = None
    if name == "shakespeare":
        data, split = _deal_plays(clients, generator, examples, large)
    else:
        data, owned = _deal(name, clients, generator, examples)
        split = partition.split(owned, generator, test=0.6 if name.startswith("cifar") else 0.2)
        if name == "digits":
            cluster = generator.permutation(np.arange(clients) % CLUSTERS)
            data = data._replace(inputs=turn_images(data.inputs, owned, cluster))
        elif name == "emnist" and clusters:
            shift = partition.shifts(clients, min(CLUSTERS, clients), generator)
            cluster = shift.cluster
    train, validation, test = (partition.stack(data, part, shift, spread=True) for part in split)
    return Scenario(data, split, shift, cluster, MODELS[name][large], train, validation, test)


def _deal_plays(clients: int, generator: Generator, examples: int | None, large: bool) -> tuple[Dataset, Split]:
    """Give each client the lines of one role. With `examples`, take equally many first examples of each client."""
    data, split = shakespeare.load(clients, generator, length=200 if large else 40, stride=1 if large else 5)
    if examples is None:
        return data, split
    most = [max(1, round(share * max(1, examples // clients))) for share in (0.6, 0.2, 0.2)]
    return data, Split(*([own[:count] for own in part] for count, part in zip(most, split, strict=True)))


def _deal(name: str, clients: int, generator: Generator, examples: int | None) -> tuple[Dataset, partition.Owned]:
    """Draw random examples of a data set and assign them to clients."""
    data = sources.load(name)
    if examples is not None and examples > len(data.labels):
        raise InvalidInput("examples", examples, f"at most {len(data.labels)}, all there are")
    data = data.rows(generator.permutation(len(data.labels))[:examples])
    if clients > len(data.labels):
        raise InvalidInput("clients", clients, f"at most {len(data.labels)}, the examples")
    if name == "cifar100":
        assert data.coarse is not None
        return data, partition.pachinko(data.coarse, data.labels, clients, generator)
    spread = 5 if name == "digits" else CONCENTRATION
    return data, partition.dirichlet(data.labels, clients, spread, generator, least=5)


def turn_images(images: np.ndarray, owned: partition.Owned, quarters: Int[np.ndarray, " n"]) -> np.ndarray:
    """Turn each client's images by its number of quarter turns, counterclockwise."""
    images = images.copy()
    for own, turns in zip(owned, quarters, strict=True):
        images[own] = np.rot90(images[own], turns, axes=(1, 2))
    return images
