"""Between a model trained alone and one trained together."""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from hyperpush.checks import check_nonnegative
from hyperpush.method import Number, as_number
from hyperpush.personalize.recipe import Model, Outer, Recipe, half_square
from hyperpush.personalize.recipes.mtl import mixture


class Interpolation(Recipe):
    """softmax(λ)_0 · softmax(logits of the shared model) + softmax(λ)_1 · softmax(logits of the own), λ ∈ R² from 0.

    The own model is part of the hyper, but only λ moves: put params that the client trained alone there (`with_own`).
    After Deng, Kamani and Mahdavi, arXiv:2003.13461, who mix params instead of predictions.

    Args:
        l2: Rate of the outer penalty ½·l2·‖λ‖², 0 or more. 0 has none; larger values keep clients alike.
    """

    l2: Number = eqx.field(converter=as_number, default=1e-2)

    def __check_init__(self):
        check_nonnegative("Interpolation.l2", self.l2)

    def params(self, model: Model, key: PRNGKeyArray) -> PyTree:
        return model.init(key)

    def hyper(self, model: Model, key: PRNGKeyArray) -> PyTree:
        return {"weights": jnp.zeros(2), "own": model.init(key)}

    def with_own(self, hypers: PyTree, alone: Callable[[], PyTree]) -> PyTree:
        return {**hypers, "own": alone()}

    def log_chances(self, model: Model, params: PyTree, hyper: PyTree, inputs: Array) -> Float[Array, "b classes"]:
        both = [model.apply(each, inputs) for each in (params, jax.lax.stop_gradient(hyper["own"]))]
        return mixture(hyper["weights"], jax.nn.log_softmax(jnp.stack(both)))

    def label_weights(self, model: Model, hyper: PyTree) -> None:
        return None

    def penalty(self, params: PyTree, hyper: PyTree) -> Float[Array, ""]:
        return half_square(self.l2, hyper["weights"])

    def shown(self, hypers: PyTree) -> dict[str, Float[Array, "n k"]]:
        return {"models": jax.nn.softmax(hypers["weights"], axis=1)}


METHODS = {"interpolation": (lambda outer: Interpolation(outer.l2), Outer(0.1, 1e-2))}
