"""What a client of BiG-Fed brings: its inner cost, and what it shows of its model to the graph."""

from collections.abc import Callable
from typing import Literal, final

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jax.scipy.sparse.linalg import cg
from jaxtyping import Array, Float, PyTree

from hyperpush.counting import marked, repeated
from hyperpush.errors import InvalidInput
from hyperpush.problem import Cost, Problem

Curvature = Literal["gauss-newton", "hessian"]


def no_cost(params: PyTree, hyper: PyTree, batch: PyTree) -> Float[Array, ""]:
    """An outer cost that is not there: the graph's alone counts."""
    return jnp.zeros(())


@final
class GraphProblem(Problem):
    """Clients with private params θ_i and one hyper φ for all, whose outer cost is one of what all of them show.

    `represent(params, hyper)` is the vector that a client shows. `residuals(params, hyper, batch)`, where it is given,
    is r with inner = ½‖r‖², which Gauss–Newton needs. `outer`, if given, is a cost of each client's own that is added.
    """

    represent: Callable[[PyTree, PyTree], Float[Array, " d"]] = eqx.field(static=True)
    residuals: Callable[[PyTree, PyTree, PyTree], Float[Array, " m"]] | None = eqx.field(static=True, default=None)

    @staticmethod
    def least_squares(
        residuals: Callable[[PyTree, PyTree, PyTree], Float[Array, " m"]],
        represent: Callable[[PyTree, PyTree], Float[Array, " d"]],
        outer: Cost = no_cost,
    ) -> "GraphProblem":
        """The problem whose inner cost is ½‖residuals‖²."""

        def inner(params: PyTree, hyper: PyTree, batch: PyTree) -> Float[Array, ""]:
            return 0.5 * jnp.sum(residuals(params, hyper, batch) ** 2)

        return GraphProblem(inner, outer, represent, residuals)


@final
class Bend(eqx.Module):
    """C + εI at one client's point, C its inner Hessian or the Gauss–Newton part R'ᵀR' of it; and J = ∂²_φθ.

    Where the residuals do not curve on average, as at the least-squares fit of a linear model, both C are equal.
    Elsewhere only Gauss–Newton's is certain to have no negative eigenvalue.
    """

    problem: Problem
    curvature: Curvature = eqx.field(static=True)
    damping: float = eqx.field(static=True)
    params: PyTree
    hyper: PyTree
    batch: PyTree

    def operator(self) -> Callable[[PyTree], PyTree]:
        """v ↦ (C + εI) · v, linearised once for many v."""
        bent = self._gauss_newton() if self.curvature == "gauss-newton" else self._hessian

        def product(vector: PyTree) -> PyTree:
            return jax.tree.map(lambda b, v: b + self.damping * v, bent(vector), vector)

        return product

    def _hessian(self, vector: PyTree) -> PyTree:
        return self.problem.hessian_product(self.params, self.hyper, self.batch, vector)

    def _gauss_newton(self) -> Callable[[PyTree], PyTree]:
        assert isinstance(self.problem, GraphProblem)
        residuals = self.problem.residuals
        assert residuals is not None
        _, push = jax.linearize(lambda x: residuals(x, self.hyper, self.batch), self.params)
        pull = jax.linear_transpose(push, self.params)
        return lambda vector: marked("hessian_products", pull(push(vector))[0])

    def solve(self, right: PyTree, iterations: int) -> PyTree:
        """(C + εI)^{-1} · right by at most `iterations` of conjugate gradients."""
        product = self.operator()
        with repeated(iterations):
            return cg(product, right, tol=1e-10, maxiter=iterations)[0]

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
    """Refuse Gauss–Newton of a problem that does not say its residuals."""
    if curvature == "gauss-newton" and getattr(problem, "residuals", None) is None:
        raise InvalidInput("BiGFed.curvature", curvature, "'hessian', or a GraphProblem that knows its residuals")
