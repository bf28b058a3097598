"""A recipe without a personal part: the shared model alone."""

from hyperpush.personalize.recipe import Recipe


class Shared(Recipe):
    """Recipe without a personal part, which predicts softmax(logits); its hyper has no effect.

    All clients train one model together, or with `LocalSGD` each client trains its own.

    **Use it** as the baseline for personal models. **Avoid it** with bilevel algorithms: it lacks a personal part.

    Example:
        >>> import jax.numpy as jnp
        >>> import hyperpush as hp
        >>> model = (lambda key: jnp.eye(2), lambda params, inputs: inputs @ params)
        >>> train = (jnp.ones((3, 4, 2)), jnp.zeros((3, 4), int))  # three clients, four examples each
        >>> task = hp.personalize.Shared().task(model, train=train, outer_on="train", key=0)
        >>> task.params.shape
        (3, 2, 2)
    """
