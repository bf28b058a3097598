"""A personal mixture of a model trained alone and one trained together."""

from collections.abc import Callable
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from hyperpush.base.numbers import as_number
from hyperpush.base.ranges import NonNegative
from hyperpush.personalize.recipe import Model, Predict, Recipe, Stage
from hyperpush.personalize.recipes.mtl import mixture
from hyperpush.task.problem import L2


class Interpolation(Recipe):
    """Recipe that mixes the predictions of the shared model and of a model that the client trained alone.

    The client predicts the probabilities

        softmax(λ)_0 · softmax(shared model's logits) + softmax(λ)_1 · softmax(own model's logits)

    λ ∈ R² starts at 0, where both models have the same weight. The own model is part of the hyper, but only λ moves.
    The own model's params come from training alone (`with_own`). After Deng, Kamani and Mahdavi, arXiv:2003.13461, who
    mix params instead of predictions.

    **Use it** if some clients do better alone and others together: each finds its own mixture. **Avoid it** if clients
    cannot train alone first.

    Args:
        l2: Rate of the outer penalty ½·l2·‖λ‖², 0 or more. 0: no penalty; larger values keep clients alike.
        outer: Optimizer of λ, `hp.optimizer(…)`.

    Example:
        >>> import jax.numpy as jnp
        >>> import hyperpush as hp
        >>> model = (lambda key: jnp.eye(2), lambda params, inputs: inputs @ params)
        >>> train = (jnp.ones((3, 4, 2)), jnp.zeros((3, 4), int))  # three clients, four examples each
        >>> task = hp.personalize.Interpolation().task(model, train=train, outer_on="train", key=0)
        >>> task.hypers["interpolation"]["weights"].shape
        (3, 2)
    """

    stage: ClassVar[Stage] = "prediction"
    l2: NonNegative = eqx.field(converter=as_number, default=1e-2, kw_only=True)

    def hyper(self, model: Model, params: PyTree, key: PRNGKeyArray) -> PyTree:
        return {"weights": jnp.zeros(2), "own": model.init(key)}

    def with_own(self, hypers: PyTree, train_alone: Callable[[], PyTree]) -> PyTree:
        return {**hypers, "own": train_alone()}

    def wrap(self, predict: Predict, model: Model, hyper: PyTree) -> Predict:
        own = jax.lax.stop_gradient(hyper["own"])

        def mix(params: PyTree, inputs: Array) -> Array:
            both = jnp.stack([predict(params, inputs), model.apply(own, inputs)])
            return mixture(hyper["weights"], jax.nn.log_softmax(both))

        return mix

    def outer_penalty(self, hyper: PyTree) -> Float[Array, ""]:
        return L2(self.l2)(hyper["weights"], None)

    def weights(self, hypers: PyTree) -> dict[str, Float[Array, "n k"]]:
        return {"models": jax.nn.softmax(hypers["weights"], axis=1)}
