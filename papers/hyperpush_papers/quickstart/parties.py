"""Digits of parties, some of whose records hurt all parties, and tasks with these data."""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int, PyTree

import hyperpush as hp
from hyperpush.base.errors import InvalidInput
from hyperpush.task.problem import L2
from hyperpush.task.task import Task
from hyperpush_papers.common.data.sources import load
from hyperpush_papers.common.models.layers import affine, dense_shapes, draw_layers
from hyperpush_papers.quickstart.config import Quickstart

EDGE = np.array([0, 7, 8, 15, 48, 55, 24, 31, 56, 63])  # by label, the pixel that a mark sets
UNITS = (64, 32, 10)  # layer sizes: pixels, hidden units with tanh, labels
PENALTY = L2(0.01)
KINDS = ("harmless", "shifted labels", "telling marks")
Kind = Literal["party", "record"]  # what has a weight of its own
Records = tuple[Float[np.ndarray, "*shape 64"], Int[np.ndarray, "*shape"]]


class Parties(NamedTuple):
    """The data of all parties, and the kind of defect of each."""

    records: Records  # untrusted: [parties, records]
    trusted: Records  # [parties, trusted]
    test: Records  # [images], not owned by a party
    kind: Int[np.ndarray, " n"]  # by party, its index in KINDS

    @property
    def harmful(self) -> Bool[np.ndarray, " n"]:
        """The parties whose data differ from the test images."""
        return self.kind > 0


def make_parties(config: Quickstart, seed: int) -> Parties:
    """Divide digits among parties, and mark one pixel of every image: at random, or in marked parties by its label.

    Shifted parties label d as d + 1, and 9 as 0. Marked parties have right labels, but a model that trains on them
    learns the mark instead of the digit. Trusted and test images have random marks and right labels.
    """
    digits, generator = load("digits"), np.random.default_rng(seed)
    n, harmful = config.parties, config.shifted + config.marked
    if harmful >= n:
        raise InvalidInput("shifted + marked", harmful, f"fewer than parties = {n}: somebody has to be right")
    each = config.records + config.trusted
    if n * each > len(digits.labels) - n:
        most = len(digits.labels) // n - 1
        raise InvalidInput("records + trusted", each, f"at most {most} for {n} parties: {digits.note}")
    kind = generator.permutation(np.repeat([1, 2, 0], [config.shifted, config.marked, n - harmful]))
    order = generator.permutation(len(digits.labels))
    parts = np.split(order, [n * config.records, n * each])

    def draw(place: Int[np.ndarray, "..."], kind: Int[np.ndarray, "..."]) -> Records:
        labels = digits.labels[place]
        marks = np.where(kind == 2, labels, generator.integers(0, digits.classes, place.shape))
        inputs = digits.inputs[place].reshape(*place.shape, -1)
        np.put_along_axis(inputs, EDGE[marks][..., None], config.amplitude, axis=-1)
        return inputs, np.where(kind == 1, (labels + 1) % digits.classes, labels)

    return Parties(
        draw(parts[0].reshape(n, -1), kind[:, None]),
        draw(parts[1].reshape(n, -1), np.array(0)),
        draw(parts[2], np.array(0)),
        kind,
    )


def logits(params: PyTree, inputs: Float[Array, "*m pixels"]) -> Float[Array, "*m labels"]:
    """Return the logits of a dense network with tanh."""
    return affine(params["dense2"], jnp.tanh(affine(params["dense1"], inputs)))


def losses(params: PyTree, hyper: PyTree, records: PyTree) -> Float[Array, " m"]:
    """Return the cross-entropy of each record."""
    return optax.softmax_cross_entropy_with_integer_labels(logits(params, records[0]), records[1])


def weigh_losses(params: PyTree, hyper: PyTree, records: PyTree) -> Float[Array, " m"]:
    """Return losses times weights from 0 to 2, of the party or of each record; λ = 0 gives the weight 1."""
    return 2 * jax.nn.sigmoid(hyper) * losses(params, hyper, records)


def weigh_penalty(params: PyTree, hyper: PyTree) -> Float[Array, ""]:
    """Return the penalty times the party's weight, so that a party of weight 0 adds no penalty."""
    return jnp.mean(2 * jax.nn.sigmoid(hyper)) * PENALTY(params, None)


def make_task(parties: Parties, seed: int, weights: Kind | None = None, *, join: bool = False) -> Task:
    """Make the task: train on records, validate on trusted records; hypers λ give a weight per party or per record.

    With `join`, training data also contain the trusted records, after the others.
    """
    pairs = zip(parties.records, parties.trusted, strict=True)
    train = tuple(np.concatenate(pair, axis=1) for pair in pairs) if join else parties.records
    return hp.Task(
        inner=weigh_losses if weights else losses,
        outer=losses,
        penalty=weigh_penalty if weights else PENALTY,
        params=draw_layers(jax.random.key(seed), dense_shapes(UNITS)),
        hypers=hp.per_example(train) if weights == "record" else 0.0,
        train=train,
        validation=parties.trusted,
    )
