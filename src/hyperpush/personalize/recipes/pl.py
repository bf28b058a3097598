"""Personal layer: a scale of one's own for every class."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from hyperpush.checks import check_nonnegative
from hyperpush.method import Number, as_number
from hyperpush.personalize.recipe import Even, Model, Outer, scaled


class PL(Even):
    """softmax(logits ⊙ C·softmax(λ)) with λ ∈ R^C from 0, where all scales are 1.

    HGP-PL of Terashita and Hara, "Decentralized hyper-gradient computation over time-varying directed networks",
    arXiv:2210.02129.

    Args:
        l2: Rate of the outer penalty ½·l2·‖λ‖², 0 or more. 0 has none; larger values keep clients alike.
    """

    l2: Number = eqx.field(converter=as_number, default=1e-3)

    def __check_init__(self):
        check_nonnegative("PL.l2", self.l2)

    def params(self, model: Model, key: PRNGKeyArray) -> PyTree:
        return model.init(key)

    def hyper(self, model: Model, key: PRNGKeyArray) -> PyTree:
        return jnp.zeros(model.classes)

    def log_chances(self, model: Model, params: PyTree, hyper: PyTree, inputs: Array) -> Float[Array, "b classes"]:
        return jax.nn.log_softmax(model.apply(params, inputs) * model.classes * jax.nn.softmax(hyper))

    def shown(self, hypers: PyTree) -> dict[str, Float[Array, "n k"]]:
        return {"labels": scaled(hypers)}


METHODS = {"pl": (lambda outer: PL(outer.l2), Outer(0.1, 1e-3))}
