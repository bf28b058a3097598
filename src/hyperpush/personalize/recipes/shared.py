"""Nothing is personal: the one model that training gives."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from hyperpush.method import Number, as_number
from hyperpush.personalize.recipe import Even, Model


class Shared(Even):
    """softmax(logits): one model for all, or with `LocalSGD` one for each. The hyper changes nothing.

    Args:
        l2: Rate of the outer penalty of the hyper, which has no effect on the model.
    """

    l2: Number = eqx.field(converter=as_number, default=0.0)

    def params(self, model: Model, key: PRNGKeyArray) -> PyTree:
        return model.init(key)

    def hyper(self, model: Model, key: PRNGKeyArray) -> PyTree:
        return jnp.zeros(1)

    def log_chances(self, model: Model, params: PyTree, hyper: PyTree, inputs: Array) -> Float[Array, "b classes"]:
        return jax.nn.log_softmax(model.apply(params, inputs))
