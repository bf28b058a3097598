"""Data augmentation: how much each label counts in one's own part of the training."""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from hyperpush.base.numbers import as_number
from hyperpush.base.ranges import NonNegative
from hyperpush.personalize.recipe import Model, Recipe, relative_weights


class DA(Recipe):
    """Training losses of label c count (C·softmax(λ))_c times, λ ∈ R^C from 0; not `normalized`, exp(λ_c) times.

    PDBO-DA of "Personalized decentralized bilevel optimization over stochastic and directed networks"; beside `MTL` its
    PDBO-MTL&DA. λ does not change what a model says, only what is trained: ∂_λ F is the penalty's alone.

    **Use it** where labels are distributed unlike at training and testing, or beside `MTL`. **Avoid it** with
    `DirectGradient`, for which λ never moves.

    Args:
        normalized: Whether a client's weights have mean 1. If not, it can count more or less in training as a whole.
        l2: Rate of the outer penalty ½·l2·‖λ‖², 0 or more. 0 has none; larger values keep clients alike.
        outer: What moves λ, `hp.optimizer(…)`.

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
