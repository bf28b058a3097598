"""Personal L2 rates for the shared params."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from hyperpush.base.numbers import as_number
from hyperpush.base.ranges import Positive
from hyperpush.personalize.recipe import Model, Recipe
from hyperpush.task.problem import L2


class L2Rates(Recipe):
    """Recipe with a personal L2 rate for each array of the shared params.

    The penalty ½·rate·Σ_a exp(λ_a)·‖x_a‖² is added to the inner cost, with one λ_a for each array x_a. Each λ_a starts
    at 0. After Pedregosa, "Hyperparameter optimization with approximate gradient", ICML 2016. λ changes training but
    not predictions.

    **Use it** if few training examples overfit a shared model, with `outer_on="validation"`. **Avoid it** with
    `outer_on="train"`, which always lowers the rates, and with `DirectGradient`, which never moves λ.

    Args:
        rate: Starting value of all rates, above 0. The option `l2` of `fit` and `task` is added to each rate.
        l2: Rate of the outer penalty ½·l2·‖λ‖², 0 or more. 0: no penalty; larger values keep rates near `rate`.
        outer: Optimizer of λ, `hp.optimizer(…)`.

    Example:
        >>> import jax.numpy as jnp
        >>> import hyperpush as hp
        >>> model = (lambda key: jnp.eye(2), lambda params, inputs: inputs @ params)
        >>> train = (jnp.ones((3, 4, 2)), jnp.zeros((3, 4), int))  # three clients, four examples each
        >>> task = hp.personalize.L2Rates().task(model, train=train, validation=train, key=0)
        >>> task.hypers["l2rates"].shape  # params are one array
        (3, 1)
    """

    rate: Positive = eqx.field(converter=as_number, default=1e-3)

    def hyper(self, model: Model, params: PyTree, key: PRNGKeyArray) -> PyTree:
        return jnp.zeros(len(_arrays(params)))

    def inner_penalty(self, params: PyTree, hyper: PyTree) -> Float[Array, ""]:
        each = [L2(self.rate)(leaf, None) for leaf in _arrays(params)]
        return jnp.dot(jnp.exp(hyper), jnp.stack(each))


def _arrays(params: PyTree) -> list[Array]:
    return jax.tree.leaves(eqx.filter(params, eqx.is_inexact_array))
