"""Personal layer: a personal scale for each class."""

import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from hyperpush.personalize.recipe import Model, Predict, Recipe, relative_weights


class PL(Recipe):
    """softmax(logits ⊙ C·softmax(λ)) with λ ∈ R^C from 0, where all scales are 1.

    HGP-PL of Terashita and Hara, "Decentralized hyper-gradient computation over time-varying directed networks",
    arXiv:2210.02129.

    **Use it** where clients see some classes more often than others: it costs C numbers per client. **Avoid it** where
    the same input has different labels at different clients, which scales of logits cannot express: take `MTL`.

    Args:
        l2: Rate of the outer penalty ½·l2·‖λ‖², 0 or more. 0: no penalty; larger values keep clients alike.
        outer: Optimizer of λ, `hp.optimizer(…)`.

    Example:
        >>> import jax.numpy as jnp
        >>> import hyperpush as hp
        >>> model = (lambda key: jnp.eye(2), lambda params, inputs: inputs @ params)
        >>> train = (jnp.ones((3, 4, 2)), jnp.zeros((3, 4), int))  # three clients, four examples each
        >>> task = hp.personalize.PL().task(model, train=train, outer_on="train", key=0)
        >>> task.hypers["pl"].shape
        (3, 2)
    """

    def hyper(self, model: Model, params: PyTree, key: PRNGKeyArray) -> PyTree:
        return jnp.zeros(model.classes)

    def wrap(self, predict: Predict, model: Model, hyper: PyTree) -> Predict:
        return lambda params, inputs: predict(params, inputs) * relative_weights(hyper)

    def weights(self, hypers: PyTree) -> dict[str, Float[Array, "n k"]]:
        return {"labels": relative_weights(hypers)}
