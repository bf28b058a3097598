"""Multi-task learning: an ensemble of shared models with personal weights."""

from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from hyperpush.base.numbers import as_number
from hyperpush.base.ranges import Count, NonNegative
from hyperpush.methods.optimizers import Optimizer, optimizer
from hyperpush.personalize.recipe import Model, Predict, Recipe, Stage


class MTL(Recipe):
    """Recipe with an ensemble of shared models, in which each client has its own weights of the models.

    With K = `models`, the client predicts the probabilities

        Σ_k softmax(λ)_k · softmax(logits_k)

    λ ∈ R^K starts at 0, where all models have the same weight. This is HGP-MTL of Terashita and Hara, "Decentralized
    hyper-gradient computation over time-varying directed networks", arXiv:2210.02129, after the mixtures of Marfoq,
    Neglia, Bellet, Kameni and Vidal, arXiv:2108.10252.

    **Use it** if there are a few kinds of clients, even with labels that contradict each other. **Avoid it** if
    training is expensive or messages must be small, because params and gradients are those of all models.

    Args:
        models: Number of shared models, at least 1. With 1, the personal part has no effect.
        l2: Rate of the outer penalty ½·l2·‖λ‖², 0 or more. 0: no penalty; larger values keep clients alike.
        outer: Optimizer of λ, `hp.optimizer(…)`.

    Example:
        >>> import jax.numpy as jnp
        >>> import hyperpush as hp
        >>> model = (lambda key: jnp.eye(2), lambda params, inputs: inputs @ params)
        >>> train = (jnp.ones((3, 4, 2)), jnp.zeros((3, 4), int))  # three clients, four examples each
        >>> task = hp.personalize.MTL(models=5).task(model, train=train, outer_on="train", key=0)
        >>> task.params.shape, task.hypers["mtl"].shape
        ((3, 5, 2, 2), (3, 5))
    """

    stage: ClassVar[Stage] = "models"
    models: Count = eqx.field(static=True, default=3)
    l2: NonNegative = eqx.field(converter=as_number, default=1e-2, kw_only=True)
    outer: Optimizer = eqx.field(default=optimizer("adam", learning_rate=1.0), kw_only=True)

    def count_models(self) -> int:
        return self.models

    def hyper(self, model: Model, params: PyTree, key: PRNGKeyArray) -> PyTree:
        return jnp.zeros(self.models)

    def wrap(self, predict: Predict, model: Model, hyper: PyTree) -> Predict:
        return lambda params, inputs: mixture(hyper, log_probs_by_model(predict, params, inputs))

    def weights(self, hypers: PyTree) -> dict[str, Float[Array, "n k"]]:
        return {"models": jax.nn.softmax(hypers, axis=1)}


def log_probs_by_model(predict: Predict, params: PyTree, inputs: Array) -> Float[Array, "k b classes"]:
    """Return the log-probability of each class by each model; models are on axis 0 of the params."""
    return jax.nn.log_softmax(jax.vmap(predict, in_axes=(0, None))(params, inputs))


def mixture(scores: Float[Array, " k"], log_probs: Float[Array, "k b classes"]) -> Float[Array, "b classes"]:
    """Return the log-probabilities of a mixture: log Σ_k softmax(scores)_k · exp(log_probs_k)."""
    return jax.nn.logsumexp(jax.nn.log_softmax(scores)[:, None, None] + log_probs, axis=0)
