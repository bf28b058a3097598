"""The accuracy lost by ε: parties with thousands of records, with noise for several ε and without noise."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

import hyperpush as hp
from hyperpush.personalize import MTL, Product
from hyperpush.personalize.recipe import Model, Recipe
from hyperpush.personalize.scores import scores
from hyperpush_papers.common.models.dense import MLP
from hyperpush_papers.common.private_runs import QUIET
from hyperpush_papers.together.parties import CLUSTERS, L2, Examples, Parties, auc, deal, shrink

DATA = "emnist"
DELTA = 1e-5
SIDE = 7  # pixels on a side to which images are shrunk
RATE = 8.0  # step size of SGP; it is large because rows have norm 1, so that the curvature is small
HGP_STEP = 1.5
RATES = {"mtl": 0.5, "trust": 1.0}  # learning rates of Adam
# bounds for clipping, chosen on seeds that are not reported
BOUNDS: Any = {"clip": 2.0, "curvature": 0.1, "coupling": 0.1}
OWN_MODEL = 2.0  # a party starts with a share of 0.88 of its cluster's model; the graph shows the cluster


class Trust(Recipe):
    """A party's training examples count 2σ(λ) times, λ ∈ R from 0.

    It replaces weights of single examples, because noise that hides one example also hides its weight.
    """

    def hyper(self, model: Model, params: PyTree, key: PRNGKeyArray) -> PyTree:
        return jnp.zeros(())

    def loss_weights(self, model: Model, hyper: PyTree, batch: PyTree) -> Float[Array, ""]:
        return 2 * jax.nn.sigmoid(hyper)

    def outer_penalty(self, hyper: PyTree) -> Float[Array, ""]:
        return jnp.zeros(())


@dataclass(frozen=True)
class PriceOfPrivacy:
    """Private and other runs on the parties of one seed."""

    seed: int
    epsilons: tuple[float, ...]
    loss: float = 0.1
    mislabel: float = 0.9
    parties: int = 8
    examples: int = 5000
    trusted: int = 1000
    test: int = 1000
    steps: int = 12
    outer_steps: int = 5
    order: int = 6
    data: str = DATA

    @cached_property
    def made(self) -> Parties:
        """Parties as in the other steps, with small images of norm 1."""
        sizes = {"examples": self.examples, "trusted": self.trusted, "test": self.test}
        found = deal(self.parties, self.seed, **sizes, mislabel=self.mislabel, data=self.data)
        train, trusted, test = ((_small(images), labels) for images, labels in (found.train, found.trusted, found.test))
        return Parties(train, trusted, test, found.wrong, MLP(SIDE**2, 10))

    def rows(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield rows of mixtures with trust and of one model, without noise and for every ε, and rows of controls."""
        inner = hp.SGP(self.steps * (self.outer_steps + 1), RATE)
        for place, epsilon in enumerate((None, *self.epsilons)):
            noise = "no noise" if epsilon is None else f"ε ≤ {epsilon:g}"
            yield f"together, {noise}", self.row(self.joined, CLUSTERS, epsilon, place)
            yield f"one model, {noise}", self.row(inner, 1, epsilon, place)
        yield "together, clipped only", self.row(self.joined, CLUSTERS, QUIET, len(self.epsilons) + 1)
        alone = hp.LocalSGD(5 * inner.steps, RATE)
        yield "everyone alone", self.row(alone, 1)
        yield "everyone alone, trusted data only", self.row(alone, 1, train=self.made.trusted)

    @property
    def joined(self) -> hp.PDBO:
        """The method that learns mixtures and trust by hypergradients."""
        adam = {name: hp.optimizer("adam", learning_rate=rate) for name, rate in RATES.items()}
        estimator = hp.TrackedHGP(self.order, HGP_STEP, pushes=2, tolerance=None)
        outer = hp.optimizer("by-name", **adam)
        return hp.PDBO(hp.SGP(self.steps, RATE), estimator, outer, self.outer_steps, restart=False)

    def task(self, models: int, train: Examples | None = None) -> hp.Task:
        """Return the task with mixtures of this many models and a trust per party; mixtures start near the cluster."""
        made, own = self.made, self.made.train if train is None else train
        more = {"key": self.seed, "l2": L2, "classes": 10}
        task = _recipes(models).task(made.model, train=own, validation=made.trusted, **more)
        start = OWN_MODEL * jnp.eye(models)[np.arange(self.parties) % models]
        return task.at(hypers={**task.hypers, "mtl": start})

    def row(
        self,
        method: hp.PDBO | hp.SGP | hp.LocalSGD,
        models: int,
        epsilon: float | None = None,
        noise: int = 0,
        train: Examples | None = None,
    ) -> dict[str, Any]:
        """Return the scores of a run and its ε; each run of a method draws its own noise."""
        network, task = hp.networks.RandomDirected(self.parties), self.task(models, train)
        if epsilon is not None:
            private = task.private(noise=hp.privacy.Gaussian(1.0), **BOUNDS)
            task = hp.within_budget(epsilon, DELTA, private, method, network)
        options: Any = {
            "key": jax.random.fold_in(jax.random.key(self.seed), noise),
            "engine": hp.Simulate(faults=hp.Faults(loss=self.loss) if self.loss else None),
        }
        solved = isinstance(method, hp.PDBO)
        found = hp.solve(task, method, network, **options) if solved else hp.train(task, method, network, **options)
        of = scores(_recipes(models), self.made.model, found.params, found.task.hypers, self.made.test)
        trust = np.asarray(found.task.hypers["trust"])
        silent = 0.0 if isinstance(method, hp.LocalSGD) else None
        return {
            "accuracy": of.average,
            "accuracy_p10": of.p10,
            "auc_wrong_labels": None,
            "bytes": found.costs.bytes,
            "epsilon": silent if epsilon is None else found.privacy.epsilon(DELTA),
            "converged": found.status.converged,
            "auc_wrong_parties": auc(trust, np.asarray(self.made.wrong.any(axis=1))) if np.ptp(trust) else None,
        }


def _recipes(models: int) -> Product:
    return Product([MTL(models=models), Trust()])


def _small(images: Float[np.ndarray, "n m side side"]) -> Float[np.ndarray, "n m 7 7"]:
    """Shrink each image to 7 × 7 pixels, subtract its mean, and scale it to norm 1; no statistics are shared."""
    block = images.shape[-1] // SIDE
    rows = shrink(images[..., : SIDE * block, : SIDE * block], block).reshape(*images.shape[:2], -1)
    rows = rows - rows.mean(-1, keepdims=True)
    rows = rows / np.maximum(np.linalg.norm(rows, axis=-1, keepdims=True), 1e-6)
    return rows.reshape(*images.shape[:2], SIDE, SIDE).astype(np.float32)
