"""The random draws behind the studies: partitions, generated problems, initial params and wrong labels."""

from typing import Any

import jax
import numpy as np

from hyperpush_papers.big_fed.config import BigFed
from hyperpush_papers.big_fed.study import draw_club, rewire
from hyperpush_papers.common.data import deepwalk, partition
from hyperpush_papers.common.data.traffic import synthetic
from hyperpush_papers.common.models.cnn import INFLUENCE
from hyperpush_papers.common.models.dense import MLP
from hyperpush_papers.common.models.lstm import LSTM
from hyperpush_papers.influence.config import InfluenceStudy
from hyperpush_papers.influence.study import task_of
from hyperpush_papers.influence.wrong_labels import noisy_digits
from hyperpush_papers.meta import study as meta
from hyperpush_papers.meta.config import Meta
from hyperpush_papers.meta.representation import layers
from hyperpush_papers.personalize.scenarios import scenario
from hyperpush_papers.private.config import CASES
from hyperpush_papers.private.streams import samples, stream
from hyperpush_papers.quickstart.config import Quickstart
from hyperpush_papers.quickstart.parties import make_parties
from hyperpush_papers.robustness.config import FAMILIES
from hyperpush_papers.robustness.families import draw as draw_family
from hyperpush_papers.together.parties import deal
from hyperpush_papers.tune import study as tune
from hyperpush_papers.tune.config import Tune
from hyperpush_papers.tune.rates import sparse_examples
from hyperpush_papers.vr_hgp.config import VRStudy
from hyperpush_papers.vr_hgp.study import two_digits

LABELS = np.arange(200) % 10


def draw() -> dict[str, Any]:
    """Return every draw by name, each from a separate seed."""
    with jax.enable_x64(True):
        return {**partitions(), **problems(), **starts()}


def partitions() -> dict[str, Any]:
    """Return partitions: the examples that each client owns."""
    coarse = LABELS // 2
    owned = partition.dirichlet(LABELS, 4, 0.4, generator(2))
    made = scenario("digits", 4, 5)
    return {
        "iid": partition.iid(200, 4, generator(1)),
        "dirichlet": owned,
        "pachinko": partition.pachinko(coarse, LABELS, 3, generator(3)),
        "split": partition.split(owned, generator(4)),
        "shifts": partition.shifts(6, 3, generator(5)),
        "scenario": [made.split, made.cluster, made.data.inputs],
        "quickstart": make_parties(Quickstart(parties=5, shifted=1, marked=2), 6),
        "together": [deal(6, 7)[:4], deal(6, 7).rewired],
        "tune": tune.read_examples(Tune(data="digits", task="class-weights", seed=8)),
        "meta": meta.draw_images(Meta(data="digits", seed=9)),
    }


def problems() -> dict[str, Any]:
    """Return generated data sets and wrong labels."""
    config, weights = BigFed(examples=5), np.diag(np.ones(11), 1) + np.diag(np.ones(11), -1)  # a path of 12 nodes
    flipped, flips, _ = noisy_digits("random", 4)
    made = stream("non-convex", 4, 5)
    return {
        "club": draw_club(config, weights, 1),
        "rewired": rewire(weights, generator(2)),
        "walks": deepwalk.walks(weights, 3, 4, generator(3)),
        "labels": [flips, leaves(flipped.train)],
        "streams": [stream(case, 4, 5)[:6] for case in CASES],
        "samples": leaves(samples(made, 20, 0.5, jax.random.key(6))),
        "families": [draw_family(family, "ring", 7, 4, 3, 2) for family in FAMILIES],
        "traffic": synthetic(6, 2, 8),
        "sparse": sparse_examples(3, 5, 7, 2, 9),
        "two digits": leaves(two_digits(VRStudy(data="digits", examples=10))[0].train),
        "influence": leaves(task_of(InfluenceStudy(model="cnn", data="digits", images=40))[0].train),
    }


def starts() -> dict[str, Any]:
    """Return the initial params of models."""
    models = {"cnn": INFLUENCE, "mlp": MLP(4, 2, (3,)), "lstm": LSTM(classes=5, embedding=2, hidden=3, layers=2)}
    return {name: leaves(model.init(jax.random.key(1))) for name, model in models.items()} | {
        "representation": leaves(layers(jax.random.key(2), (4, 3, 2)))
    }


def leaves(tree: Any) -> list[np.ndarray]:
    """Return the arrays of a pytree."""
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


def generator(seed: int) -> np.random.Generator:
    """Return NumPy's generator for a seed."""
    return np.random.default_rng(seed)
