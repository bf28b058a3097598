"""Classifiers made of dense layers."""

from math import prod

import equinox as eqx
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from hyperpush.base.errors import InvalidInput
from hyperpush_papers.common.models.layers import dense, dense_shapes, draw_layers


class MLP(eqx.Module):
    """A dense layer with ReLU for each of `hidden`, then one that gives `classes` logits; inputs are flattened.

    With no hidden layers, the default, it is logistic regression.
    """

    inputs: int = eqx.field(static=True)
    classes: int = eqx.field(static=True)
    hidden: tuple[int, ...] = eqx.field(static=True, converter=tuple, default=())

    def init(self, key: PRNGKeyArray) -> PyTree:
        """Weights and biases uniform in ±1/√(inputs of a unit), as PyTorch draws them by default."""
        return draw_layers(key, dense_shapes((self.inputs, *self.hidden, self.classes)))

    def apply(self, params: PyTree, inputs: Float[Array, "b ..."]) -> Float[Array, "b classes"]:
        """The logits of each example."""
        if prod(inputs.shape[1:]) != self.inputs:
            raise InvalidInput("inputs", inputs.shape, f"[any number, …] with {self.inputs} numbers each")
        return dense(params, inputs.reshape(inputs.shape[0], -1), len(self.hidden) + 1)
