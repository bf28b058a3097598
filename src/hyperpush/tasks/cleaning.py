"""Hyper-cleaning: linear classifiers with learned weights of training examples, or of groups of them.

The inner cost f and the outer cost F of a client are

    f(W, λ) = mean_j σ(λ_s(j)) ℓ(W; a_j, y_j) + ½ l2 ‖W‖²,    F(W) = mean of ℓ on validation examples

ℓ is softmax cross-entropy, σ the sigmoid, and s(j) the slot of λ for example j. Each example has a separate slot
(Franceschi, Frasconi, Salzo, Grazzi, Pontil 2018), or shares the slot of its group, such as its class.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int

from hyperpush.base.checks import check_probability
from hyperpush.base.errors import InvalidInput
from hyperpush.task.problem import L2
from hyperpush.task.starts import per_example
from hyperpush.task.task import Task


class Labeled(NamedTuple):
    """Examples: inputs of ℓ2 norm at most 1, and labels."""

    inputs: Float[Array | np.ndarray, "*clients m d"]
    labels: Int[Array | np.ndarray, "*clients m"]


class Slotted(NamedTuple):
    """Labeled examples, with the slot of each example's weight in the hypers."""

    inputs: Float[Array, "*clients m d"]
    labels: Int[Array, "*clients m"]
    slots: Int[Array, "*clients m"]


def losses(params: Float[Array, "d c"], hyper: Float[Array, " s"], batch: Labeled | Slotted) -> Float[Array, " m"]:
    """Return the softmax cross-entropy of each example, which does not depend on the hypers."""
    return optax.softmax_cross_entropy_with_integer_labels(batch.inputs @ params, batch.labels)


def weighted_losses(params: Float[Array, "d c"], hyper: Float[Array, " s"], batch: Slotted) -> Float[Array, " m"]:
    """Return the loss of each example, times the weight σ(λ) of its slot."""
    return jax.nn.sigmoid(hyper[batch.slots]) * losses(params, hyper, batch)


def own_weighted_losses(params: Float[Array, "d c"], hyper: Float[Array, " m"], batch: Labeled) -> Float[Array, " m"]:
    """Return the loss of each example, times its own weight σ(λ); `hyper` holds one λ per example of the batch."""
    return jax.nn.sigmoid(hyper) * losses(params, hyper, batch)


def accuracy(params: Float[Array, "d c"], batch: Labeled) -> Float[Array, ""]:
    """Return the share of examples whose label has the highest score."""
    return jnp.mean(jnp.argmax(batch.inputs @ params, axis=1) == batch.labels)


def unit_rows(inputs: Float[np.ndarray, "... d"]) -> Float[np.ndarray, "... e"]:
    """Append a constant 1 to every input, and scale every input by itself to ℓ2 norm 1."""
    with_one = np.concatenate([inputs, np.ones((*inputs.shape[:-1], 1), inputs.dtype)], axis=-1)
    return with_one / np.linalg.norm(with_one, axis=-1, keepdims=True)


def corrupt_labels(
    labels: Int[np.ndarray, "*shape"], share: float, into: Sequence[int], seed: int
) -> tuple[Int[np.ndarray, "*shape"], Bool[np.ndarray, "*shape"]]:
    """Replace each label, with probability `share`, by a random other label from `into`.

    Return the labels, and a mask that is True where a label was replaced.
    """
    check_probability("share", share)
    wrong_labels = np.unique(into)
    if wrong_labels.size < 2:
        raise InvalidInput("into", list(into), "at least 2 labels: one has to be replaced by another")
    generator = np.random.default_rng(seed)
    wrong = generator.random(labels.shape) < share
    place = np.searchsorted(wrong_labels, labels) % wrong_labels.size
    inside = wrong_labels[place] == labels
    # A label in `into` moves 1 to k − 1 places on; any other one takes one of the k labels.
    steps = np.where(
        inside,
        generator.integers(1, wrong_labels.size, labels.shape),
        generator.integers(0, wrong_labels.size, labels.shape),
    )
    return np.where(wrong, wrong_labels[(place + steps) % wrong_labels.size], labels), wrong


def cleaning(
    train: Labeled,
    validation: Labeled,
    classes: int,
    slots: Int[np.ndarray, "clients m"] | None = None,
    l2: float = 1e-3,
    common: bool = False,
) -> Task:
    """Make a task of hyper-cleaning: a linear classifier with learned weights of training examples or their groups.

    With the classifier W, the softmax cross-entropy ℓ and the sigmoid σ, the inner and outer cost of client i are

        f_i(W, λ) = mean_j σ(λ_s(j)) ℓ(W; a_j, y_j) + ½ l2 ‖W‖²,    F_i(W) = mean of ℓ on validation examples

    **Use it** to find wrong labels (Franceschi, Frasconi, Salzo, Grazzi, Pontil 2018): with a clean validation set the
    weights of wrong examples fall. Weights start at σ(0) = ½, classifiers at zero.

    Args:
        train: Inputs [clients, examples, features] and labels from 0 to classes − 1.
        validation: The same for the outer cost; its labels should be right.
        classes: Number of classes, at least 2.
        slots: The slot s(j) of each training example's weight in the hypers, such as its label. None gives each
            example a separate weight at its client (`hp.per_example`).
        l2: Rate of the penalty, 0 or more; above 0 the classifier is unique.
        common: True if all clients must agree on the weights; requires `slots`.

    Raises:
        InvalidInput: `slots` does not have one entry per training example.

    Example:
        >>> import numpy as np
        >>> import hyperpush as hp
        >>> from hyperpush.tasks.cleaning import Labeled
        >>> part = Labeled(np.eye(4)[None].repeat(3, 0), np.array([[0, 1, 0, 1]] * 3))
        >>> hp.tasks.cleaning(part, part, classes=2)
        Task(3 clients, 8 params each; train 4, validation 4 examples; the outer level fits 'validation')
    """
    features = train.inputs.shape[-1]
    if slots is not None and slots.shape != train.labels.shape:
        raise InvalidInput("slots", slots.shape, f"one per training example, {train.labels.shape}")
    inputs, labels, dtype = jnp.asarray(train.inputs), jnp.asarray(train.labels), jnp.zeros(()).dtype
    data = Labeled(inputs, labels) if slots is None else Slotted(inputs, labels, jnp.asarray(slots))
    return Task(
        inner=own_weighted_losses if slots is None else weighted_losses,
        penalty=L2(l2),
        outer=losses,
        params=jnp.zeros((features, classes), dtype),
        hypers=per_example(data) if slots is None else jnp.zeros(int(slots.max()) + 1, dtype),
        train=data,
        validation=Labeled(*map(jnp.asarray, validation)),
        common=common,
    )
