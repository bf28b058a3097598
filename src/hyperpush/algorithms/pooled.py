"""What one machine with everybody's data would do, as exact averages: parts of algorithms with a server.

All are nodes on states with `params`, `hyper` and `value` that are, or become, the same at every client.
"""

from dataclasses import replace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, PRNGKeyArray, PyTree

from hyperpush.algorithms.inverse import ConjugateGradients, Inverse, Neumann, down
from hyperpush.data.batches import draw
from hyperpush.hypergradients.base import HypergradientState
from hyperpush.hypergradients.implicit_cg import ImplicitCG
from hyperpush.optimizers import StepSize, step_size_at
from hyperpush.problem import Problem
from hyperpush.programs import Average, Context, Node, Repeat, Scope, Sequence, Server


def mean(get: Any, put: Any) -> Average:
    """`put(state, mean over clients of get(state, context), context)`."""
    return Average(
        lambda state, ctx: (get(state, ctx), jnp.ones(())),
        lambda state, average, mass, ctx: put(state, average, ctx),
        rounds=1,
        by="exact",
    )


def common(*fields: str) -> Average:
    """Everybody continues from the mean of these fields."""
    return mean(
        lambda state, ctx: {field: getattr(state, field) for field in fields},
        lambda state, average, ctx: replace(state, **average),
    )


def inner_descent(problem: Problem, step_size: StepSize, batch_size: int | None) -> Average:
    """params ← params − β·mean of ∂_x f_i, where β is that of the iteration of the loop around."""

    def slope(state: Any, ctx: Context) -> PyTree:
        return problem.inner_gradient(state.params, state.hyper, draw(ctx.data.train, batch_size, ctx.key))

    def put(state: Any, average: PyTree, ctx: Context) -> Any:
        return replace(state, params=down(state.params, average, step_size_at(step_size, ctx.round)))

    return mean(slope, put)


def outer_descent(step_size: StepSize) -> Average:
    """hyper ← hyper − α·mean of `value`."""

    def put(state: Any, average: PyTree, ctx: Context) -> Any:
        return replace(state, hyper=down(state.hyper, average, step_size_at(step_size, ctx.round)))

    return mean(lambda state, ctx: state.value, put)


class _Series(eqx.Module):
    params: PyTree
    hyper: PyTree
    along_hyper: PyTree  # ∂_λF_i
    term: PyTree
    added: PyTree
    length: Int[Array, ""]


def pooled_hypergradient(problem: Problem, inverse: Inverse, batch_size: int | None) -> Node:
    """`value` ← ∂_λF_i − B_i H̄^{-1} mean_k ∂_xF_k, H̄ the mean of all Hessians: its mean is dF̄/dλ for one λ.

    A server draws the length of a random series, so that all take the same term.
    """
    if isinstance(inverse, ConjugateGradients):
        return _by_conjugate_gradients(problem, inverse.steps)
    return _by_series(problem, inverse, batch_size)


def _by_conjugate_gradients(problem: Problem, steps: int) -> Node:
    return Scope(
        ImplicitCG(steps).program(problem),
        lambda state, ctx: HypergradientState(state.params, state.hyper, state.value),
        # An estimator's are the parts of a sum, d_{λ_i}F̄.
        lambda state, found, ctx: replace(state, value=jax.tree.map(lambda v: v * ctx.clients, found.value)),
    )


def _by_series(problem: Problem, inverse: Neumann, batch_size: int | None) -> Node:
    def enter(state: Any, ctx: Context) -> _Series:
        examples = draw(ctx.data.outer, batch_size, ctx.key)
        along_x, along_hyper = problem.outer_gradients(state.params, state.hyper, examples)
        return _Series(state.params, state.hyper, along_hyper, along_x, along_x, jnp.zeros((), jnp.int32))

    def begin(messages: PyTree, key: PRNGKeyArray) -> PyTree:
        length = jax.random.randint(key, (), 0, inverse.terms) if inverse.random else inverse.terms - 1

        def everywhere(leaf: Array) -> Array:
            return jnp.broadcast_to(jnp.mean(leaf, axis=0, keepdims=True), leaf.shape)

        clients = jax.tree.leaves(messages)[0].shape[0]
        return jax.tree.map(everywhere, messages), jnp.full(clients, length, jnp.int32)

    def begun(state: _Series, answer: tuple[PyTree, Int[Array, ""]], ctx: Context) -> _Series:
        right, length = answer
        return replace(state, term=right, added=right, length=length)

    def product(state: _Series, ctx: Context) -> PyTree:
        examples = draw(ctx.data.train, batch_size, ctx.key)
        return problem.hessian_product(state.params, state.hyper, examples, state.term)

    def multiply(state: _Series, average: PyTree, ctx: Context) -> _Series:
        term = down(state.term, average, inverse.step_size)
        return replace(state, term=term, added=jax.tree.map(jnp.add, state.added, term))

    def leave(before: Any, state: _Series, ctx: Context) -> Any:
        q = inverse.total(state.term, state.added)
        back = problem.jacobian_product(state.params, state.hyper, draw(ctx.data.train, batch_size, ctx.key), q)
        return replace(before, value=jax.tree.map(jnp.subtract, state.along_hyper, back))

    times = (lambda state, ctx: state.length) if inverse.random else None
    body = Sequence(
        Server(lambda state, ctx: state.term, begin, begun),
        Repeat(mean(product, multiply), inverse.terms - 1, times=times, name="Neumann"),
    )
    return Scope(body, enter, leave)
