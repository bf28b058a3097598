"""Recurrent backpropagation through stochastic gradient push: what the estimators that reverse its links share.

SGP's expected step has a fixed point x̄; its derivative by the clients' hypers is B̄(I − Ā)^{-1} c_x + c_λ, where

    gradient-after:  (Ā u)_i = Σ_j p̄_{i→j} u_j − γ/ω_i H_i u_i,        (B̄ u)_i = −γ B_i u_i
    gradient-first:  m_i = Σ_j p̄_{i→j} u_j,  (Ā u)_i = m_i − γ/ω_i H_i m_i,  (B̄ u)_i = −γ B_i m_i

with H_i = ∂²_xx f_i, B_i = ∂²_λx f_i, c_x = (1/n)∂_x F_i/ω_i, c_λ = (1/n)∂_λ F_i. Messages must flow against the
links of SGP: a client weighs what it hears from j with p̄_{i→j}/δ̄_{j→i}, which is p̄_{i→j} on average whenever j can be
heard at all. The target is O(γ) away from the hypergradient of the exact consensus solution.
"""

from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from hyperpush.checks import check_integer, check_positive
from hyperpush.data.batches import draw
from hyperpush.errors import InvalidInput
from hyperpush.hypergradients.base import HypergradientState, outer_gradient_shares
from hyperpush.inner.base import LinkEstimates
from hyperpush.method import Number
from hyperpush.problem import Problem
from hyperpush.programs import Context, Exchange, Inbox, Node, Repeat, Scope, Sequence

Variant = Literal["gradient-first", "gradient-after"]


class Backward(eqx.Module):
    """A client on the way back through SGP."""

    params: PyTree
    hyper: PyTree
    links: LinkEstimates
    source: PyTree  # c_x
    u: PyTree
    value: PyTree  # v


def check_recurrent(estimator: Any) -> None:
    """Refuse options that make no sense, naming the field."""
    name = type(estimator).__name__
    check_integer(f"{name}.steps", estimator.steps, minimum=0)
    check_positive(f"{name}.step_size", estimator.step_size)
    check_integer(f"{name}.batch_size", estimator.batch_size, minimum=1, optional=True)


def enter(problem: Problem, state: HypergradientState, ctx: Context) -> tuple[Backward, PyTree]:
    """Where the way back starts (with v = 0), and c_λ."""
    if state.links is None:
        raise InvalidInput("links", None, "estimates of the links (train with SGP(observe=True), or network means)")
    along_x, along_hyper = outer_gradient_shares(problem, state, ctx)
    mass = state.links.mass
    source = jax.tree.map(lambda g: g / mass, along_x)
    zero = jax.tree.map(jnp.zeros_like, along_hyper)
    return Backward(state.params, state.hyper, state.links, source, source, zero), along_hyper


def reversed_weights(state: Backward, ctx: Context) -> Float[Array, " n"]:
    """p̃_{j→i} = p̄_{i→j}/δ̄_{j→i} for what is heard from j; the own entry is p̄_{i→i}."""
    links = state.links
    return jnp.where(links.heard > 0, links.sent / jnp.where(links.heard > 0, links.heard, 1), 0)


def maps(
    problem: Problem,
    state: Backward,
    ctx: Context,
    vector: PyTree,
    mixed: PyTree,
    step_size: Number,
    variant: Variant,
    batch_size: int | None,
) -> tuple[PyTree, PyTree]:
    """(A u, B u) of one client for u = `vector`, once the reversed messages have been mixed."""
    at = vector if variant == "gradient-after" else mixed
    along_x, along_hyper = problem.products(state.params, state.hyper, draw(ctx.data.train, batch_size, ctx.key), at)
    onward = jax.tree.map(lambda m, h: m - step_size / state.links.mass * h, mixed, along_x)
    return onward, jax.tree.map(lambda b: -step_size * b, along_hyper)


def add(a: PyTree, b: PyTree, scale: Number = 1.0) -> PyTree:
    """a + scale · b."""
    return jax.tree.map(lambda x, y: x + scale * y, a, b)


def recurrent_program(problem: Problem, estimator: Any, weights: Any, independent: bool = False) -> Node:
    """The way back, with the given weights for what is heard; u and v may take `independent` rounds and batches."""

    def step(state: Backward, inbox: Inbox, ctx, move: bool, collect: bool) -> Backward:
        options = estimator.step_size, estimator.variant, estimator.batch_size
        onward, along = maps(problem, state, ctx, state.u, inbox.mix(state.u), *options)
        value = add(state.value, along) if collect else state.value
        return Backward(state.params, state.hyper, state.links, state.source, onward if move else state.u, value)

    def exchange(move: bool, collect: bool) -> Exchange:
        return Exchange(
            send=lambda state, ctx: state.u,
            receive=lambda state, inbox, ctx: step(state, inbox, ctx, move, collect),
            weights=weights,
        )

    body = Sequence(exchange(False, True), exchange(True, False)) if independent else exchange(True, True)

    def leave(before: HypergradientState, state: Backward, ctx) -> HypergradientState:
        return HypergradientState(
            before.params, before.hyper, add(state.value, enter(problem, before, ctx)[1]), before.links
        )

    back = Repeat(body, estimator.steps, name=type(estimator).__name__)
    return Scope(back, lambda state, ctx: enter(problem, state, ctx)[0], leave)
