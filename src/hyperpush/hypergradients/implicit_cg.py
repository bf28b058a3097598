"""Implicit differentiation by conjugate gradients whose products are averaged exactly, as a server would."""

from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, PyTree

from hyperpush.checks import check_integer, check_nonnegative, check_positive
from hyperpush.data.batches import everything
from hyperpush.hypergradients.base import HypergradientEstimator, HypergradientState, outer_gradient_shares
from hyperpush.method import MethodInfo, Number, as_number
from hyperpush.problem import Problem
from hyperpush.programs import Average, Context, Node, Repeat, Scope, Sequence


class Solving(eqx.Module):
    """A client while all solve k systems together; the flat vectors are the same at every client once they begin."""

    params: PyTree
    hyper: PyTree
    size: Float[Array, " k"]  # squared norms of the right-hand sides
    q: Float[Array, "k d"]
    residual: Float[Array, "k d"]
    direction: Float[Array, "k d"]


def start_solving(state: HypergradientState, right: Float[Array, "k d"]) -> Solving:
    """The systems whose right-hand sides are the means of all clients' `right`."""
    return Solving(state.params, state.hyper, jnp.zeros(len(right)), jnp.zeros_like(right), right, right)


def check_solving(estimator: Any) -> None:
    """Refuse a number of steps or a damping that make no sense, naming the field."""
    name = type(estimator).__name__
    check_integer(f"{name}.steps", estimator.steps, minimum=1)
    check_nonnegative(f"{name}.damping", estimator.damping)


def conjugate_gradients(problem: Problem, steps: int, damping: Number, tolerance: Number | None, name: str) -> Node:
    """q = (mean Hessian + damping·I)^{-1} b on `Solving` states, until ‖residual‖ ≤ tolerance·‖b‖ for all b.

    Averaged are the right-hand sides b and, in each step, the products H_i p. Every client continues from there by
    itself: the vectors, and with them their dot products, are common.
    """

    def begin(state: Solving, right: Float[Array, "k d"], mass, ctx: Context):
        return Solving(state.params, state.hyper, _dot(right, right), state.q, right, right)

    def products(state: Solving, ctx: Context):
        back, examples = ravel_pytree(state.params)[1], everything(ctx.data.train)

        def one(vector: Float[Array, " d"]):
            return ravel_pytree(problem.hessian_product(state.params, state.hyper, examples, back(vector)))[0]

        return jax.vmap(one)(state.direction), jnp.ones(())

    def advance(state: Solving, product: Float[Array, "k d"], mass, ctx: Context):
        product = product + damping * state.direction
        before = _dot(state.residual, state.residual)
        length = _ratio(before, _dot(state.direction, product))
        q = state.q + length * state.direction
        residual = state.residual - length * product
        direction = residual + _ratio(_dot(residual, residual), before) * state.direction
        return Solving(state.params, state.hyper, state.size, q, residual, direction)

    def done(state: Solving, ctx: Context):
        assert tolerance is not None
        return jnp.all(_dot(state.residual, state.residual) <= tolerance**2 * state.size)

    share = Average(lambda state, ctx: (state.residual, jnp.ones(())), begin, rounds=1, by="exact")
    step = Average(products, advance, rounds=1, by="exact")
    return Sequence(share, Repeat(step, steps, until=None if tolerance is None else done, name=name))


def _dot(a: Float[Array, "k d"], b: Float[Array, "k d"]) -> Float[Array, " k"]:
    return jnp.sum(a * b, axis=1)


def _ratio(a: Float[Array, " k"], b: Float[Array, " k"]) -> Float[Array, "k 1"]:
    """a/b, and 0 where b is: a system that is solved stays as it is."""
    return jnp.where(b == 0, 0, a / jnp.where(b == 0, 1, b))[:, None]


def implicit(
    problem: Problem, state: HypergradientState, along_hyper: PyTree, q: Float[Array, " d"], ctx: Context
) -> HypergradientState:
    """The estimate `along_hyper` − B_i q."""
    vector = ravel_pytree(state.params)[1](q)
    product = problem.jacobian_product(state.params, state.hyper, everything(ctx.data.train), vector)
    return HypergradientState(state.params, state.hyper, jax.tree.map(jnp.subtract, along_hyper, product), state.links)


class ImplicitCG(HypergradientEstimator):
    """Implicit differentiation by conjugate gradients whose products are averaged exactly.

    The estimate is (1/n) ∂_λ F_i − B_i q, where (Σ_k H_k) q = (1/n) Σ_j ∂_x F_j is solved as on one machine (Pedregosa,
    arXiv:1602.02355). Each step takes the mean of the clients' products H_k p, each at its own params.

    **Use it** if there is a server. **Avoid it** without one, and with mini-batches, which
    conjugate gradients do not tolerate.

    Args:
        steps: Iterations at most, at least 1. But for rounding as many as there are eigenvalues suffice.
        damping: Added to the diagonal of the mean Hessian, 0 or more, so that it is positive definite.
        tolerance: End when the residual is at most this share of the right-hand side, on which clients then agree over
            the network after each step; None takes all `steps`.

    Raises:
        InvalidInput: An option is out of range; the message names it and what is allowed.
    """

    info: ClassVar[MethodInfo] = MethodInfo(
        network="server",
        target="global",
        sends="one vector of the size of the params per step",
        paper="Pedregosa, Hyperparameter optimization with approximate gradient",
        example={"steps": 10},
    )

    steps: int = eqx.field(static=True)
    damping: Number = eqx.field(converter=as_number, default=0.0)
    tolerance: Number | None = eqx.field(converter=as_number, default=None)

    def __check_init__(self):
        check_solving(self)
        check_positive("ImplicitCG.tolerance", self.tolerance, optional=True)

    def program(self, problem: Problem) -> Node:
        def enter(state: HypergradientState, ctx: Context):
            return start_solving(state, ravel_pytree(outer_gradient_shares(problem, state, ctx)[0])[0][None])

        def leave(before: HypergradientState, state: Solving, ctx: Context):
            return implicit(problem, before, outer_gradient_shares(problem, before, ctx)[1], state.q[0], ctx)

        solve = conjugate_gradients(problem, self.steps, self.damping, self.tolerance, "ImplicitCG")
        return Scope(solve, enter, leave)
