"""Data augmentation: how much each label counts in one's own part of the training."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from hyperpush.checks import check_nonnegative
from hyperpush.method import Number, as_number
from hyperpush.personalize.recipe import Model, Outer, Recipe, half_square, scaled
from hyperpush.personalize.recipes.mtl import MTL
from hyperpush.personalize.recipes.shared import Shared


class DA(Recipe):
    """Training losses of label c count (C·softmax(λ))_c times, λ ∈ R^C from 0, on top of another recipe `of`.

    PDBO-DA of "Personalized decentralized bilevel optimization over stochastic and directed networks"; with `of=MTL()`
    its PDBO-MTL&DA. λ does not change what a model says, only what is trained: ∂_λ F is the penalty's alone.

    Args:
        l2: Rate of the outer penalty ½·l2·‖λ‖², 0 or more. 0 has none; larger values keep clients alike.
        of: The recipe whose training is weighted.
    """

    l2: Number = eqx.field(converter=as_number, default=0.0)
    of: Recipe = Shared()

    def __check_init__(self):
        check_nonnegative("DA.l2", self.l2)

    def params(self, model: Model, key: PRNGKeyArray) -> PyTree:
        return self.of.params(model, key)

    def hyper(self, model: Model, key: PRNGKeyArray) -> PyTree:
        return {"labels": jnp.zeros(model.classes), "of": self.of.hyper(model, key)}

    def log_chances(self, model: Model, params: PyTree, hyper: PyTree, inputs: Array) -> Float[Array, "b classes"]:
        return self.of.log_chances(model, params, hyper["of"], inputs)

    def label_weights(self, model: Model, hyper: PyTree) -> Float[Array, " classes"]:
        own, others = model.classes * jax.nn.softmax(hyper["labels"]), self.of.label_weights(model, hyper["of"])
        return own if others is None else own * others

    def penalty(self, params: PyTree, hyper: PyTree) -> Float[Array, ""]:
        return half_square(self.l2, hyper["labels"]) + self.of.penalty(params, hyper["of"])

    @property
    def several(self) -> bool:
        return self.of.several

    def shown(self, hypers: PyTree) -> dict[str, Float[Array, "n k"]]:
        return {"labels": scaled(hypers["labels"]), **self.of.shown(hypers["of"])}


METHODS = {
    "da": (lambda outer: DA(outer.l2), Outer(0.1, 0.0)),
    "mtl-da": (lambda outer: DA(outer.label_l2, MTL(l2=outer.l2)), Outer(0.1, 1e-2, 0.1, 5e-4)),
}
