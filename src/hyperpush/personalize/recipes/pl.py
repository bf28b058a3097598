"""Personal layer: a personal scale of the logit of each class."""

import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from hyperpush.personalize.recipe import Model, Predict, Recipe, relative_weights


class PL(Recipe):
    """Recipe with a personal scale of each class's logit.

    The client predicts the probabilities

        softmax(logits ⊙ C·softmax(λ))

    λ ∈ R^C, for C classes, starts at 0, where all scales are 1. This is HGP-PL of Terashita and Hara, "Decentralized
    hyper-gradient computation over time-varying directed networks", arXiv:2210.02129.

    **Use it** if clients see some classes more often than others: it takes only C numbers per client. **Avoid it** if
    the same input has different labels at different clients, which scales of logits cannot express: use `MTL`.

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
