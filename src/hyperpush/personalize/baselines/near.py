"""What draws params to those of another model."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from hyperpush.method import Number
from hyperpush.problem import L2, Penalty


class Near(eqx.Module):
    """The penalty ½·rate·‖params − center‖², beside another one if there is one."""

    rate: Number
    center: PyTree
    beside: Penalty | None = None

    def __call__(self, params: PyTree, hyper: PyTree) -> Float[Array, ""]:
        numbers = eqx.filter(params, eqx.is_inexact_array)
        own = L2(self.rate)(jax.tree.map(jnp.subtract, numbers, self.center), hyper)
        return own if self.beside is None else own + self.beside(params, hyper)
