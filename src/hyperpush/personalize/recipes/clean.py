"""Cleaning: a weight for each training example."""

import equinox as eqx
import jax
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from hyperpush.base.numbers import as_number
from hyperpush.base.ranges import NonNegative
from hyperpush.methods.optimizers import Optimizer, optimizer
from hyperpush.personalize.recipe import Model, Recipe
from hyperpush.task.starts import PerExample


class Clean(Recipe):
    """Recipe with a weight 2σ(λ_j) for each training example j, where σ is the sigmoid.

    Each λ_j starts at 0, where all weights are 1. After Franceschi, Frasconi, Salzo, Grazzi and Pontil, "Bilevel
    programming for hyperparameter optimization and meta-learning", ICML 2018.

    **Use it** if some training examples hurt all clients, and validation examples can be trusted. **Avoid it** with
    `outer_on="train"`, which fits the wrong labels, and with `DirectGradient`, which never moves λ.

    Args:
        l2: Rate of the outer penalty ½·l2·‖λ‖², 0 or more. 0: no penalty; larger values keep weights near 1.
        outer: Optimizer of λ, `hp.optimizer(…)`.

    Example:
        >>> import jax.numpy as jnp
        >>> import hyperpush as hp
        >>> model = (lambda key: jnp.eye(2), lambda params, inputs: inputs @ params)
        >>> train = (jnp.ones((3, 4, 2)), jnp.zeros((3, 4), int))  # three clients, four examples each
        >>> task = hp.personalize.Clean().task(model, train=train, validation=train, key=0)
        >>> task.hypers["clean"].shape
        (3, 4)
    """

    l2: NonNegative = eqx.field(converter=as_number, default=0.0, kw_only=True)
    outer: Optimizer = eqx.field(default=optimizer("adam", learning_rate=0.5), kw_only=True)

    def hyper(self, model: Model, params: PyTree, key: PRNGKeyArray) -> PyTree:
        return PerExample(0.0)

    def loss_weights(self, model: Model, hyper: PyTree, batch: PyTree) -> Float[Array, " b"]:
        return 2 * jax.nn.sigmoid(hyper)

    def weights(self, hypers: PyTree) -> dict[str, Float[Array, "n m"]]:
        return {"examples": 2 * jax.nn.sigmoid(hypers)}
