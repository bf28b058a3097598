"""The curvature of a client's inner cost: products with it, solves, and whole matrices."""

from collections.abc import Callable
from typing import Literal, final

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jax.scipy.sparse.linalg import cg
from jaxtyping import Array, Float, PyTree

from hyperpush.errors import InvalidInput
from hyperpush.method import Number
from hyperpush.problem import ModelLoss, Problem
from hyperpush.programs.counting import repeated

Curvature = Literal["gauss-newton", "hessian"]


@final
class Bend(eqx.Module):
    """C + εI at one client's point, C its inner Hessian or the Gauss–Newton part R'ᵀℓ''R' of it; and J = ∂²_φθ.

    Where the model's own curvature averages out, as at the least-squares fit of a linear model, both C are equal.
    Elsewhere only Gauss–Newton's is certain to have no negative eigenvalue, for a loss that is convex.
    """

    problem: Problem
    curvature: Curvature = eqx.field(static=True)
    damping: Number
    params: PyTree
    hyper: PyTree
    batch: PyTree

    def operator(self) -> Callable[[PyTree], PyTree]:
        """v ↦ (C + εI) · v, linearized once for many v."""
        at = self.params, self.hyper, self.batch
        bent = self.problem.gauss_newton(*at) if self.curvature == "gauss-newton" else self._hessian

        def product(vector: PyTree) -> PyTree:
            return jax.tree.map(lambda b, v: b + self.damping * v, bent(vector), vector)

        return product

    def _hessian(self, vector: PyTree) -> PyTree:
        return self.problem.hessian_product(self.params, self.hyper, self.batch, vector)

    def solve(self, right: PyTree, steps: int) -> PyTree:
        """(C + εI)^{-1} · right by at most `steps` of conjugate gradients."""
        product = self.operator()
        with repeated(steps):
            return cg(product, right, tol=1e-10, maxiter=steps)[0]

    def across(self, vector: PyTree) -> PyTree:
        """J · vector."""
        return self.problem.jacobian_product(self.params, self.hyper, self.batch, vector)

    def blocks(self) -> tuple[Float[Array, "p p"], Float[Array, "h p"]]:
        """C + εI and J as matrices."""
        flat, restore = ravel_pytree(self.params)

        def columns(apply: Callable[[PyTree], PyTree]) -> Float[Array, "rows p"]:
            return jax.vmap(lambda unit: ravel_pytree(apply(restore(unit)))[0], out_axes=1)(jnp.eye(flat.size))

        return columns(self.operator()), columns(self.across)


def check_curvature(problem: Problem, curvature: Curvature) -> None:
    """Refuse Gauss–Newton of an inner cost in one part."""
    if curvature == "gauss-newton" and not isinstance(problem.inner, ModelLoss):
        allowed = "'hessian', or a task with inner=(model, loss), whose parts Gauss–Newton needs"
        raise InvalidInput("BiGFed.curvature", curvature, allowed)
