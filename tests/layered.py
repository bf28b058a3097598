"""A classifier of named dense layers, as pure functions."""

from math import prod, sqrt

import equinox as eqx
import jax

from hyperpush.base.errors import InvalidInput


def layer(key, shape):
    """Return a layer with weights and biases uniform in ±1/√inputs."""
    weight, bias = jax.random.split(key)
    bound = 1 / sqrt(shape[0])
    return {
        "weight": jax.random.uniform(weight, shape, minval=-bound, maxval=bound),
        "bias": jax.random.uniform(bias, shape[1:], minval=-bound, maxval=bound),
    }


class Layered(eqx.Module):
    """Classifier with layers `dense1`, `dense2`, … and ReLU between them; the last layer gives the logits."""

    inputs: int = eqx.field(static=True)
    classes: int = eqx.field(static=True)
    hidden: tuple[int, ...] = eqx.field(static=True, default=())

    def init(self, key):
        units = (self.inputs, *self.hidden, self.classes)
        keys = jax.random.split(key, len(units) - 1)
        return {f"dense{place + 1}": layer(own, units[place : place + 2]) for place, own in enumerate(keys)}

    def apply(self, params, inputs):
        if prod(inputs.shape[1:]) != self.inputs:
            raise InvalidInput("inputs", inputs.shape, f"[any number, …] with {self.inputs} numbers each")
        found = inputs.reshape(len(inputs), -1)
        for place in range(len(self.hidden) + 1):
            layer = params[f"dense{place + 1}"]
            found = (jax.nn.relu(found) if place else found) @ layer["weight"] + layer["bias"]
        return found
