"""Nothing is personal: the one model that training gives."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from hyperpush.personalize.recipe import Even, Model


class Shared(Even):
    """softmax(logits): one model for all, or with `Alone` one for each. The hyper is a number that changes nothing."""

    l2: float = eqx.field(static=True, default=0.0)

    def params(self, model: Model, key: PRNGKeyArray) -> PyTree:
        return model.init(key)

    def hyper(self, model: Model, key: PRNGKeyArray) -> PyTree:
        return jnp.zeros(1)

    def log_chances(self, model: Model, params: PyTree, hyper: PyTree, inputs: Array) -> Float[Array, "b classes"]:
        return jax.nn.log_softmax(model.apply(params, inputs))
