"""Data augmentation: how much each label counts in one's own part of the training."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from hyperpush.method import Number, as_number
from hyperpush.personalize.recipe import Model, Recipe, relative_weights
from hyperpush.personalize.recipes.shared import Shared
from hyperpush.problem import L2


class DA(Recipe):
    """Training losses of label c count (C·softmax(λ))_c times, λ ∈ R^C from 0, on top of another recipe `of`.

    PDBO-DA of "Personalized decentralized bilevel optimization over stochastic and directed networks"; with `of=MTL()`
    its PDBO-MTL&DA. λ does not change what a model says, only what is trained: ∂_λ F is the penalty's alone.

    **Use it** where labels are distributed unlike at training and testing, or beside `MTL`. **Avoid it** with
    `DirectGradient`, for which λ never moves.

    Args:
        l2: Rate of the outer penalty ½·l2·‖λ‖², 0 or more. 0 has none; larger values keep clients alike.
        of: The recipe whose training is weighted.

    Example:
        >>> import jax.numpy as jnp
        >>> import hyperpush as hp
        >>> model = (lambda key: jnp.eye(2), lambda params, inputs: inputs @ params)
        >>> train = (jnp.ones((3, 4, 2)), jnp.zeros((3, 4), int))  # three clients, four examples each
        >>> task = hp.personalize.DA(of=hp.personalize.MTL(models=2)).task(model, train=train, outer_on="train", key=0)
        >>> {name: each.shape for name, each in task.hypers.items()}  # λ, and the hyper of MTL
        {'labels': (3, 2), 'of': (3, 2)}
    """

    l2: Number = eqx.field(converter=as_number, default=0.0)
    of: Recipe = Shared()

    def params(self, model: Model, key: PRNGKeyArray) -> PyTree:
        return self.of.params(model, key)

    def hyper(self, model: Model, key: PRNGKeyArray) -> PyTree:
        return {"labels": jnp.zeros(model.classes), "of": self.of.hyper(model, key)}

    def log_probs(self, model: Model, params: PyTree, hyper: PyTree, inputs: Array) -> Float[Array, "b classes"]:
        return self.of.log_probs(model, params, hyper["of"], inputs)

    def label_weights(self, model: Model, hyper: PyTree) -> Float[Array, " classes"]:
        own, others = model.classes * jax.nn.softmax(hyper["labels"]), self.of.label_weights(model, hyper["of"])
        return own if others is None else own * others

    def penalty(self, params: PyTree, hyper: PyTree) -> Float[Array, ""]:
        return L2(self.l2)(hyper["labels"], None) + self.of.penalty(params, hyper["of"])

    @property
    def is_ensemble(self) -> bool:
        return self.of.is_ensemble

    def weights(self, hypers: PyTree) -> dict[str, Float[Array, "n k"]]:
        return {"labels": relative_weights(hypers["labels"]), **self.of.weights(hypers["of"])}
