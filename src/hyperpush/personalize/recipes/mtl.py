"""Multi-task learning: an ensemble whose weights are one's own."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from hyperpush.checks import check_integer, check_nonnegative
from hyperpush.method import Number, as_number
from hyperpush.personalize.model import several
from hyperpush.personalize.recipe import Even, Model, Outer


class MTL(Even):
    """Σ_k softmax(λ)_k · softmax(logits_k) of `models` shared models, λ ∈ R^K from 0, where all count alike.

    HGP-MTL of Terashita and Hara, "Decentralized hyper-gradient computation over time-varying directed networks",
    arXiv:2210.02129, after the mixtures of Marfoq, Neglia, Bellet, Kameni and Vidal, arXiv:2108.10252.

    Args:
        models: Shared models, at least 1. With 1 nothing is personal.
        l2: Rate of the outer penalty ½·l2·‖λ‖², 0 or more. 0 has none; larger values keep clients alike.
    """

    models: int = eqx.field(static=True, default=3)
    l2: Number = eqx.field(converter=as_number, default=1e-2)

    def __check_init__(self):
        check_integer("MTL.models", self.models, minimum=1)
        check_nonnegative("MTL.l2", self.l2)

    def params(self, model: Model, key: PRNGKeyArray) -> PyTree:
        return several(model, key, self.models)

    def hyper(self, model: Model, key: PRNGKeyArray) -> PyTree:
        return jnp.zeros(self.models)

    def log_chances(self, model: Model, params: PyTree, hyper: PyTree, inputs: Array) -> Float[Array, "b classes"]:
        return mixture(hyper, each(model, params, inputs))

    @property
    def several(self) -> bool:
        return True

    def shown(self, hypers: PyTree) -> dict[str, Float[Array, "n k"]]:
        return {"models": jax.nn.softmax(hypers, axis=1)}


def each(model: Model, params: PyTree, inputs: Array) -> Float[Array, "k b classes"]:
    """The logarithm of every class's probability by every model; models are on axis 0 of the params."""
    return jax.nn.log_softmax(jax.vmap(model.apply, in_axes=(0, None))(params, inputs))


def mixture(scores: Float[Array, " k"], log_chances: Float[Array, "k b classes"]) -> Float[Array, "b classes"]:
    """log Σ_k softmax(scores)_k · exp(log_chances_k)."""
    return jax.nn.logsumexp(jax.nn.log_softmax(scores)[:, None, None] + log_chances, axis=0)


METHODS = {"mtl": (lambda outer: MTL(l2=outer.l2), Outer(1.0, 1e-2))}
