"""A personal last layer."""

from typing import ClassVar

import equinox as eqx
import jax
from jaxtyping import PyTree

from hyperpush.methods.optimizers import Optimizer, optimizer
from hyperpush.personalize.recipe import Model, Predict, Recipe, Stage


class Head(Recipe):
    """Recipe with a personal last layer: the layer that gives the logits is the hyper, and all other layers are shared.

    "Personalized decentralized bilevel optimization over stochastic and directed networks" names this use.

    **Use it** if clients need personal classifiers on common features, and have enough examples to fit them. With
    several models (`MTL`) each model has a personal last layer. **Avoid it** for models of one layer, which are
    refused, and for params other than a dict of layers.

    Args:
        layer: Name of the personal layer in the params, a dict of layers. Empty takes the only layer with one bias per
            class.
        l2: Rate of the outer penalty ½·l2·‖layer‖², 0 or more. 0: no penalty; larger values keep clients alike.
        outer: Optimizer of the layer, `hp.optimizer(…)`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import hyperpush as hp
        >>> def draw(key):  # a model: params to start from, and the logits
        ...     layer = lambda key, shape: {"weight": jax.random.normal(key, shape), "bias": jnp.zeros(shape[1])}
        ...     first, second = jax.random.split(key)
        ...     return {"body": layer(first, (2, 5)), "last": layer(second, (5, 2))}
        >>> def logits(params, inputs):
        ...     hidden = jnp.tanh(inputs @ params["body"]["weight"] + params["body"]["bias"])
        ...     return hidden @ params["last"]["weight"] + params["last"]["bias"]
        >>> train = (jnp.ones((3, 4, 2)), jnp.zeros((3, 4), int))  # three clients, four examples each
        >>> task = hp.personalize.Head().task((draw, logits), train=train, outer_on="train", key=0)
        >>> sorted(task.params), sorted(task.hypers["head"])
        (['body'], ['bias', 'weight'])
    """

    stage: ClassVar[Stage] = "params"
    layer: str = eqx.field(static=True, default="")
    outer: Optimizer = eqx.field(default=optimizer("adam", learning_rate=0.003), kw_only=True)

    def split(self, model: Model, params: PyTree) -> tuple[PyTree, PyTree]:
        rest = dict(params)
        own = rest.pop(self.find_layer(model))
        return rest, own

    def wrap(self, predict: Predict, model: Model, hyper: PyTree) -> Predict:
        return lambda params, inputs: predict({**params, self.find_layer(model): hyper}, inputs)

    def why_unfit(self, model: Model) -> str | None:
        layers = jax.eval_shape(model.init, jax.random.key(0))
        if not isinstance(layers, dict):
            return "Head takes params that are a dict of layers, and this model has others"
        if len(layers) < 2:
            return "the model has no layer before the one that gives its logits"
        if self.layer and self.layer not in layers:
            return f"Head(layer={self.layer!r}) is none of the layers {', '.join(layers)}"
        if not self.layer and len(_last_layers(layers, model)) != 1:
            return f"Head(layer=…) has to name the one of {', '.join(layers)} that gives the logits"
        return None

    def find_layer(self, model: Model) -> str:
        """Return the name of the layer that gives the logits."""
        return self.layer or _last_layers(jax.eval_shape(model.init, jax.random.key(0)), model)[0]


def _last_layers(layers: dict[str, PyTree], model: Model) -> list[str]:
    """Return the names of layers with one bias per class."""
    biases = {name: layer.get("bias") for name, layer in layers.items() if isinstance(layer, dict)}
    return [name for name, bias in biases.items() if getattr(bias, "shape", None) == (model.classes,)]
