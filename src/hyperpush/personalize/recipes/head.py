"""The last layer is one's own."""

import equinox as eqx
import jax
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from hyperpush.checks import check_nonnegative
from hyperpush.errors import InvalidInput
from hyperpush.method import Number, as_number
from hyperpush.personalize.recipe import Even, Model, Outer


class Head(Even):
    """softmax(logits) of a model whose layer that gives the logits is the hyper; all before it is trained together.

    One of the uses named in "Personalized decentralized bilevel optimization over stochastic and directed networks".

    Args:
        layer: Name of the own layer in the params, a dict of layers. Empty takes the only one with as many biases as
            there are classes.
        l2: Rate of the outer penalty ½·l2·‖layer‖², 0 or more. 0 has none; larger values keep clients alike.
    """

    layer: str = eqx.field(static=True, default="")
    l2: Number = eqx.field(converter=as_number, default=1e-3)

    def __check_init__(self):
        check_nonnegative("Head.l2", self.l2)

    def params(self, model: Model, key: PRNGKeyArray) -> PyTree:
        name, layers = self.name(model), model.init(key)
        return {other: layer for other, layer in layers.items() if other != name}

    def hyper(self, model: Model, key: PRNGKeyArray) -> PyTree:
        return model.init(key)[self.name(model)]

    def log_chances(self, model: Model, params: PyTree, hyper: PyTree, inputs: Array) -> Float[Array, "b classes"]:
        return jax.nn.log_softmax(model.apply({**params, self.name(model): hyper}, inputs))

    def continued(self, model: Model, params: PyTree, hypers: PyTree) -> tuple[PyTree, PyTree]:
        rest = dict(params)
        own = rest.pop(self.name(model))
        return rest, own

    def unfit(self, model: Model) -> str | None:
        try:
            self.name(model)
        except InvalidInput:
            return "the model has no layer before the one that gives its logits"
        return None

    def name(self, model: Model) -> str:
        """The layer that gives the logits."""
        layers = jax.eval_shape(model.init, jax.random.key(0))
        layers = layers if isinstance(layers, dict) else {}
        last = [
            name
            for name, layer in layers.items()
            if isinstance(layer, dict) and getattr(layer.get("bias"), "shape", None) == (model.classes,)
        ]
        found = [self.layer] if self.layer else last
        if len(found) != 1 or found[0] not in layers or len(layers) < 2:
            raise InvalidInput(
                "Head.layer", self.layer, f"a layer of the model, which has {sorted(layers)}, and another before it"
            )
        return found[0]


METHODS = {"head": (lambda outer: Head(l2=outer.l2), Outer(0.003, 1e-3))}
