"""Training on chosen records, and control methods that choose records by a model's predictions."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PyTree

import hyperpush as hp
from hyperpush import influence
from hyperpush.networks import Network
from hyperpush.task.task import Task
from hyperpush_papers.quickstart import report
from hyperpush_papers.quickstart.parties import Parties, logits, make_task
from hyperpush_papers.quickstart.report import Row

STEP_SIZE = 0.5  # step size of training
AT_ONCE = 3  # number of trainings in one compiled program
TUNING = 0.2  # factor of the step size when a trained model is fine-tuned

Kept = Float[np.ndarray, "n #m"] | Bool[np.ndarray, "n #m"]  # weights of records, relative to trusted records


class Choice(NamedTuple):
    """A choice of records to keep, and its cost."""

    name: str
    group: str
    kept: Kept
    trainings: int = 0
    floats: int = 0  # floats that each party sends, including trainings
    status: str = ""  # status of the estimate; empty: that of training


@eqx.filter_jit
def find_labels(params: PyTree, inputs: Float[Array, "n m pixels"]) -> Int[Array, "n m"]:
    """Return the labels that each party's model predicts."""
    return jax.vmap(lambda x, own: jnp.argmax(logits(x, own), axis=-1))(params, inputs)


@dataclass(frozen=True)
class Trainer:
    """Training on the kept records and the trusted ones, with the same links each time."""

    parties: Parties
    network: Network
    steps: int
    seed: int

    @cached_property
    def task(self) -> Task:
        """The task on all records, with the trusted ones last."""
        return make_task(self.parties, self.seed, join=True)

    def rows(self, choices: list[Choice], one: hp.Training) -> list[Row]:
        """Return a row for each given choice of records and each other control; `one` is a training, for its costs."""
        everything = np.ones(self.parties.records[1].shape)
        louder = self.parties.trusted[1].size / (2 * everything.size)
        plain = [
            Choice(report.AS_IS, "control", everything),
            Choice(report.TRUSTED, "control", 0 * everything),
            Choice(report.LOUDER, "control", louder * everything),
            Choice(report.HARMLESS, "bound", ~self.parties.harmful[:, None]),
            Choice(report.RIGHT, "bound", self.parties.kind[:, None] != 1),  # 1: shifted labels
        ]
        models = self.train([each.kept for each in (*plain, *choices)])
        shared, trusted = models[:2]
        more = [
            (Choice(report.TUNED, "control", everything, 1), self.tune(shared)),
            *self.filters(shared, trusted),
            (Choice(report.ALONE, "control", everything), self.train_alone()),
        ]
        rows = []
        for choice, model in (*zip((*plain, *choices), models, strict=True), *more):
            last = 0 if choice.name == report.ALONE else one.costs.floats
            rows.append(
                {
                    "method": choice.name,
                    "group": choice.group,
                    "accuracy": self.accuracy(model),
                    "kept": float(np.mean(choice.kept > 0)),
                    "trainings": choice.trainings + 1,
                    "floats_per_client": last + (choice.floats or choice.trainings * one.costs.floats),
                    "status": choice.status or str(one.status),
                }
            )
        return rows

    def train(self, kept: list[Kept], start: PyTree = None, step_size: float = STEP_SIZE) -> list[PyTree]:
        """Train for each choice of records, and return every party's model; weights are scaled to a mean of 1."""
        weights, solver = [self._weights(each) for each in kept], hp.SGP(self.steps, step_size)
        around: Any = {"key": self.seed, "at_once": AT_ONCE}
        found = influence.retrain(self.task.at(params=start), solver, self.network, weights, **around).params
        return [jax.tree.map(lambda leaf, run=run: leaf[run], found) for run in range(len(kept))]

    def _weights(self, kept: Kept) -> influence.Weights:
        (_, records), (_, trusted) = self.parties.records, self.parties.trusted
        weights = np.concatenate([np.broadcast_to(kept, records.shape), np.ones(trusted.shape)], axis=1)
        plain = influence.without(self.task)
        return eqx.tree_at(lambda w: w.examples, plain, jnp.asarray(weights / weights.mean(), jnp.float32))

    def accuracy(self, model: PyTree) -> float:
        """Return the mean test accuracy of the parties' copies of the model, on all test images."""
        inputs, labels = self.parties.test
        shown = jnp.broadcast_to(inputs, (len(self.parties.kind), *inputs.shape))
        return float(jnp.mean(find_labels(model, shown) == labels))

    def agrees(self, model: PyTree) -> Kept:
        """Return True for records whose label is predicted by the party's copy of the model."""
        inputs, labels = self.parties.records
        return np.asarray(find_labels(model, jnp.asarray(inputs))) == labels

    def filters(self, shared: PyTree, trusted: PyTree) -> list[tuple[Choice, PyTree]]:
        """Drop records that a model contradicts, train again, and repeat; also drop whole parties."""
        mostly = np.mean(self.agrees(trusted), axis=1, keepdims=True) > 0.5
        models, kept = [shared, trusted], []
        for _ in range(report.ROUNDS):  # the third training is the same each time, since the program has three
            kept = [*map(self.agrees, models[:2]), mostly]
            models = self.train(kept)
        names = zip(report.FILTERS, kept, (report.ROUNDS, report.ROUNDS, 1), strict=True)
        choices = [Choice(name, "control", own, trainings) for name, own, trainings in names]
        return list(zip(choices, models, strict=True))

    def tune(self, shared: PyTree) -> PyTree:
        """Return the shared model after further training on trusted records only, with a smaller step size."""
        return self.train([np.zeros((len(self.parties.kind), 1))], shared, TUNING * STEP_SIZE)[0]

    def train_alone(self) -> PyTree:
        """Train each party's model alone, on the party's records and trusted records."""
        return hp.train(self.task, hp.LocalSGD(self.steps, STEP_SIZE), self.network, key=self.seed).params
