"""Nothing is personal: the one model that training gives."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from hyperpush.method import Number, as_number
from hyperpush.personalize.recipe import Model, Recipe


class Shared(Recipe):
    """softmax(logits): one model for all, or with `LocalSGD` one for each. The hyper changes nothing.

    **Use it** as what personal models are compared with. **Avoid it** with bilevel algorithms: nothing is personal.

    Args:
        l2: Rate of the outer penalty of the hyper, which has no effect on the model.

    Example:
        >>> import jax.numpy as jnp
        >>> import hyperpush as hp
        >>> model = (lambda key: jnp.eye(2), lambda params, inputs: inputs @ params)
        >>> train = (jnp.ones((3, 4, 2)), jnp.zeros((3, 4), int))  # three clients, four examples each
        >>> task = hp.personalize.Shared().task(model, train=train, outer_on="train", key=0)
        >>> task.params.shape
        (3, 2, 2)
    """

    l2: Number = eqx.field(converter=as_number, default=0.0)

    def hyper(self, model: Model, key: PRNGKeyArray) -> PyTree:
        return jnp.zeros(1)

    def log_probs(self, model: Model, params: PyTree, hyper: PyTree, inputs: Array) -> Float[Array, "b classes"]:
        return jax.nn.log_softmax(model.apply(params, inputs))
