"""The damped curvature of a client's inner cost: products and solves of linear systems with it."""

from collections.abc import Callable
from functools import partial
from typing import Literal, final

import equinox as eqx
import optax
from jax.scipy.sparse.linalg import cg
from jaxtyping import PyTree

from hyperpush.base.numbers import Number
from hyperpush.programs.counting import repeated
from hyperpush.task.problem import Problem

Curvature = Literal["gauss-newton", "hessian"]


@final
class DampedCurvature(eqx.Module):
    """The damped curvature C + εI of a client's inner cost, and the mixed derivative J = ∂²_φθ, at one point.

    C is the Hessian of the inner cost, or the Gauss–Newton part R'ᵀℓ''R' of it.
    Both choices of C are equal where the model's own second derivatives average out, as at the least-squares fit of a
    linear model. Elsewhere, only the Gauss–Newton part is certain to be positive semidefinite, if the loss is convex.
    """

    problem: Problem
    curvature: Curvature = eqx.field(static=True)
    damping: Number
    params: PyTree
    hyper: PyTree
    batch: PyTree

    def operator(self) -> Callable[[PyTree], PyTree]:
        """Return the function v ↦ (C + εI) · v, which is linearized once for many v."""
        at = self.params, self.hyper, self.batch
        hessian = partial(self.problem.hessian_product, *at)
        product = self.problem.gauss_newton(*at) if self.curvature == "gauss-newton" else hessian
        return lambda vector: optax.tree.add_scale(product(vector), self.damping, vector)

    def solve(self, right: PyTree, steps: int) -> PyTree:
        """Return (C + εI)⁻¹ · right, by at most `steps` steps of conjugate gradients."""
        with repeated(steps):
            return cg(self.operator(), right, tol=1e-10, maxiter=steps)[0]

    def across(self, vector: PyTree) -> PyTree:
        """Return the product of the mixed derivative J = ∂²_φθ and a vector."""
        return self.problem.jacobian_product(self.params, self.hyper, self.batch, vector)
