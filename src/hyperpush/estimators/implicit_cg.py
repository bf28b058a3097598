"""Implicit differentiation by conjugate gradients whose products are averaged exactly, as a server would."""

from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, PyTree

from hyperpush.checks import positive, whole
from hyperpush.data.batches import everything
from hyperpush.errors import InvalidInput
from hyperpush.estimators.state import Declaration, Hyper, shared_gradients
from hyperpush.problem import Problem
from hyperpush.program import Average, Context, Node, Repeat, Sequence, Within


class Solving(eqx.Module):
    """A client while all solve k systems together; the flat vectors are the same at every client once they begin."""

    params: PyTree
    hyper: PyTree
    size: Float[Array, " k"]  # squared norms of the right-hand sides
    q: Float[Array, "k d"]
    residual: Float[Array, "k d"]
    direction: Float[Array, "k d"]


def start_solving(state: Hyper, right: Float[Array, "k d"]) -> Solving:
    """The systems whose right-hand sides are the means of all clients' `right`."""
    return Solving(state.params, state.hyper, jnp.zeros(len(right)), jnp.zeros_like(right), right, right)


def check_solving(name: str, iterations: int, damping: float) -> None:
    whole(f"{name}.iterations", iterations, least=1)
    if not 0 <= damping < float("inf"):
        raise InvalidInput(f"{name}.damping", damping, "a finite number, 0 or more")


def conjugate_gradients(problem: Problem, iterations: int, damping: float, tolerance: float | None, name: str) -> Node:
    """q = (mean Hessian + damping·I)^{-1} b on `Solving` states, until ‖residual‖ ≤ tolerance·‖b‖ for all b.

    Averaged are the right-hand sides b and, in each iteration, the products H_i p. Every client goes on from there by
    itself: the vectors, and with them their dot products, are common.
    """

    def begin(state: Solving, right: Float[Array, "k d"], mass, ctx: Context):
        return Solving(state.params, state.hyper, _dot(right, right), state.q, right, right)

    def products(state: Solving, ctx: Context):
        back, examples = ravel_pytree(state.params)[1], everything(ctx.data.inner)

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
    return Sequence(share, Repeat(step, iterations, until=None if tolerance is None else done, name=name))


def _dot(a: Float[Array, "k d"], b: Float[Array, "k d"]) -> Float[Array, " k"]:
    return jnp.sum(a * b, axis=1)


def _ratio(a: Float[Array, " k"], b: Float[Array, " k"]) -> Float[Array, "k 1"]:
    """a/b, and 0 where b is: a system that is solved stays as it is."""
    return jnp.where(b == 0, 0, a / jnp.where(b == 0, 1, b))[:, None]


def implicit(problem: Problem, state: Hyper, along_hyper: PyTree, q: Float[Array, " d"], ctx: Context) -> Hyper:
    """The estimate `along_hyper` − B_i q."""
    vector = ravel_pytree(state.params)[1](q)
    product = problem.jacobian_product(state.params, state.hyper, everything(ctx.data.inner), vector)
    return Hyper(state.params, state.hyper, jax.tree.map(jnp.subtract, along_hyper, product), state.links)


class ImplicitCG(eqx.Module):
    """(1/n)∂_λF_i − B_i q, where (Σ_k H_k) q = (1/n)Σ_j ∂_xF_j is solved by conjugate gradients.

    Implicit differentiation as on one machine (Pedregosa 2016), with exact averages: each iteration takes the mean of
    the clients' products H_k p, each at its own params. It ends after `iterations`, or when the residual is at most
    `tolerance` of the right-hand side, on which clients then agree over the network after each iteration. `damping` is
    added to the diagonal of the mean Hessian, which must then be positive definite.
    """

    declares: ClassVar[Declaration] = Declaration(
        network="a server, or any that can average exactly",
        target="global: everybody's mean outer cost",
        sends="vectors of the size of the params",
        matrices=False,
        paper="Pedregosa, Hyperparameter optimization with approximate gradient",
    )

    iterations: int = eqx.field(static=True)
    damping: float = eqx.field(static=True, converter=float, default=0.0)
    tolerance: float | None = eqx.field(static=True, default=None)

    def __check_init__(self):
        check_solving("ImplicitCG", self.iterations, self.damping)
        if self.tolerance is not None:
            positive("ImplicitCG.tolerance", self.tolerance)

    def program(self, problem: Problem) -> Node:
        def enter(state: Hyper, ctx: Context):
            return start_solving(state, ravel_pytree(shared_gradients(problem, state, ctx)[0])[0][None])

        def leave(before: Hyper, state: Solving, ctx: Context):
            return implicit(problem, before, shared_gradients(problem, before, ctx)[1], state.q[0], ctx)

        solve = conjugate_gradients(problem, self.iterations, self.damping, self.tolerance, "ImplicitCG")
        return Within(solve, enter, leave)
