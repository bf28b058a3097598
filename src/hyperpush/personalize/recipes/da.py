"""Data augmentation: a weight in training for each label."""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from hyperpush.base.numbers import as_number
from hyperpush.base.ranges import NonNegative
from hyperpush.personalize.recipe import Model, Recipe, relative_weights


class DA(Recipe):
    """Recipe with a weight for each label in training, by which the losses of its examples are multiplied.

    The weight of label c among C labels is (C·softmax(λ))_c; with `normalized=False` it is exp(λ_c). λ ∈ R^C starts at
    0, where all weights are 1. This is PDBO-DA of "Personalized decentralized bilevel optimization over stochastic and
    directed networks"; with `MTL` it is PDBO-MTL&DA. λ changes training but not predictions, so only the penalty has a
    direct gradient ∂_λ F.

    **Use it** if training and test labels have different distributions, or with `MTL`. **Avoid it** with
    `DirectGradient`, which never moves λ.

    Args:
        normalized: True gives a client's weights the mean 1. False lets a client count more or less in training.
        l2: Rate of the outer penalty ½·l2·‖λ‖², 0 or more. 0: no penalty; larger values keep clients alike.
        outer: Optimizer of λ, `hp.optimizer(…)`.

    Example:
        >>> import jax.numpy as jnp
        >>> import hyperpush as hp
        >>> model = (lambda key: jnp.eye(2), lambda params, inputs: inputs @ params)
        >>> train = (jnp.ones((3, 4, 2)), jnp.zeros((3, 4), int))  # three clients, four examples each
        >>> task = hp.personalize.DA().task(model, train=train, outer_on="train", key=0)
        >>> task.hypers["da"].shape
        (3, 2)
    """

    normalized: bool = eqx.field(static=True, default=True)
    l2: NonNegative = eqx.field(converter=as_number, default=0.0, kw_only=True)

    def hyper(self, model: Model, params: PyTree, key: PRNGKeyArray) -> PyTree:
        return jnp.zeros(model.classes)

    def loss_weights(self, model: Model, hyper: PyTree, batch: PyTree) -> Float[Array, " b"]:
        return self.weights(hyper)["labels"][batch[1]]

    def weights(self, hypers: PyTree) -> dict[str, Float[Array, "*n k"]]:
        return {"labels": relative_weights(hypers) if self.normalized else jnp.exp(hypers)}
