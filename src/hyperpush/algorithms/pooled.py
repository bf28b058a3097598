"""Parts of algorithms with a server: steps that use exact averages over all clients."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int, PRNGKeyArray, PyTree

from hyperpush.algorithms.base import descend
from hyperpush.algorithms.inverse import ConjugateGradients, ImplicitDescent, Inverse, Neumann
from hyperpush.data.batches import minibatch
from hyperpush.hypergradients.base import HypergradientState
from hyperpush.hypergradients.implicit_cg import ImplicitCG
from hyperpush.programs import Average, Context, Node, Repeat, Scope, Sequence, Server
from hyperpush.task.problem import Problem


def mean(get: Callable[[Any, Context], PyTree], put: Callable[[Any, PyTree, Context], Any]) -> Average:
    """Return the node that takes the exact mean m over clients of `get(state, context)`.

    It sets every client's state to `put(state, m, context)`.
    """
    return Average(
        lambda state, ctx: (get(state, ctx), jnp.ones(())),
        lambda state, average, mass, ctx: put(state, average, ctx),
        rounds=1,
        by="exact",
    )


def average_fields(*fields: str) -> Average:
    """Return the node that replaces these fields of every client by their exact mean over clients."""
    return mean(
        lambda state, ctx: {field: getattr(state, field) for field in fields},
        lambda state, average, ctx: replace(state, **average),
    )


class PooledState(eqx.Module):
    """A client's state in an algorithm with a server, which makes params and hyper equal at all clients."""

    params: PyTree
    hyper: PyTree
    value: PyTree  # the client's part of the hypergradient


class PooledDescent(ImplicitDescent):
    """The base class of algorithms with a server: params and hypers descend along exact means of clients' gradients.

    States have the fields `params`, `hyper` and `value`.
    """

    def descend_inner(self, problem: Problem) -> Average:
        """Return the node that subtracts β·mean of ∂_y g_i from params, with β at the round of the enclosing loop."""
        return mean(
            lambda state, ctx: self.inner_gradient(problem, state.params, state.hyper, ctx),
            lambda state, slope, ctx: replace(state, params=descend(state.params, slope, self.rates(ctx.round)[1])),
        )

    def hypergradient(self, problem: Problem) -> Node:
        """Return the node that sets `value` to the client's part of the hypergradient."""
        return pooled_hypergradient(problem, self.inverse, self.batch_size)

    def descend_outer(self) -> Average:
        """Return the node that subtracts α·mean of `value` from hyper, with α at the round of the enclosing loop."""
        return mean(
            lambda state, ctx: state.value,
            lambda state, value, ctx: replace(state, hyper=descend(state.hyper, value, self.rates(ctx.round)[0])),
        )


def pooled_hypergradient(problem: Problem, inverse: Inverse, batch_size: int | None) -> Node:
    """Return the node that sets `value` to ∂_λF_i − B_i H̄⁻¹ mean_k ∂_xF_k, with the mean H̄ of all Hessians.

    The mean of `value` is dF̄/dλ for a common λ. If the series is random, a server draws its length, so that all clients
    take the same term.
    """
    if isinstance(inverse, ConjugateGradients):
        return Scope(
            ImplicitCG(inverse.steps).program(problem),
            lambda state, ctx: HypergradientState(state.params, state.hyper, state.value),
            # The estimator returns the parts d_{λ_i}F̄ of a sum.
            lambda state, found, ctx: replace(state, value=optax.tree.scale(ctx.clients, found.value)),
        )
    return _by_series(problem, inverse, batch_size)


class _Series(eqx.Module):
    params: PyTree
    hyper: PyTree
    along_hyper: PyTree  # ∂_λF_i
    term: PyTree
    added: PyTree
    length: Int[Array, ""]


def _by_series(problem: Problem, inverse: Neumann, batch_size: int | None) -> Node:
    def enter(state: PooledState, ctx: Context) -> _Series:
        examples = minibatch(ctx.data.outer, batch_size, ctx.key)
        along_x, along_hyper = problem.outer_gradients(state.params, state.hyper, examples)
        return _Series(state.params, state.hyper, along_hyper, along_x, along_x, jnp.zeros((), jnp.int32))

    def begin(messages: PyTree, key: PRNGKeyArray) -> PyTree:
        length = jax.random.randint(key, (), 0, inverse.terms) if inverse.random else inverse.terms - 1

        def everywhere(leaf: Array) -> Array:
            return jnp.broadcast_to(jnp.mean(leaf, axis=0, keepdims=True), leaf.shape)

        clients = jax.tree.leaves(messages)[0].shape[0]
        return jax.tree.map(everywhere, messages), jnp.full(clients, length, jnp.int32)

    def receive(state: _Series, answer: tuple[PyTree, Int[Array, ""]], ctx: Context) -> _Series:
        right, length = answer
        return replace(state, term=right, added=right, length=length)

    def product(state: _Series, ctx: Context) -> PyTree:
        examples = minibatch(ctx.data.train, batch_size, ctx.key)
        return problem.hessian_product(state.params, state.hyper, examples, state.term)

    def multiply(state: _Series, average: PyTree, ctx: Context) -> _Series:
        term = descend(state.term, average, inverse.step_size)
        return replace(state, term=term, added=optax.tree.add(state.added, term))

    def leave(before: PooledState, state: _Series, ctx: Context) -> PooledState:
        q = inverse.total(state.term, state.added)
        back = problem.jacobian_product(state.params, state.hyper, minibatch(ctx.data.train, batch_size, ctx.key), q)
        return replace(before, value=optax.tree.sub(state.along_hyper, back))

    times = (lambda state, ctx: state.length) if inverse.random else None
    body = Sequence(
        Server(lambda state, ctx: state.term, begin, receive),
        Repeat(mean(product, multiply), inverse.terms - 1, times=times, name="Neumann"),
    )
    return Scope(body, enter, leave)
