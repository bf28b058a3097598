"""Determine settings before a solve: the number of pushes that mix well, and the mean of the clients' curvatures.

Clients send only a few scalars for them, which cost next to nothing beside vectors of the size of the params.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, PRNGKeyArray, PyTree

from hyperpush.programs import Context, Exchange, Inbox, Local, Node, Repeat, Scope, Sequence

MOST_PUSHES = 8192  # largest number of leaves that fits a compiled chunk
PROBES = 4
SHRINK = 3.0  # factor by which the differences between clients must fall
GROWTH = 1.5  # growth of the rounds from one vote to the next, so that votes are few


class _Probe(eqx.Module):
    values: Float[Array, " p"]
    curvature: Float[Array, ""]
    mass: Float[Array, ""]
    pushed: Int[Array, ""]
    wanted: Int[Array, ""]


def learn_settings(pushes: int | None) -> Node:
    """Return a program that sets `pushes` (unless given) and `curvature` of a state with these fields.

    Every client starts from random numbers whose mean over the clients is 0, drawn from a table that all can compute.
    Clients push them until at each client their root mean square is at most 1/`SHRINK` of that at the start. They vote
    on this after 1, 2, 3, 5, 8, … rounds. The number of rounds is the result, and the curvatures are averaged in the
    same rounds. If `pushes` is not given but already known to the state, the state stays as it is and nothing is sent.
    """

    def enter(state: Any, ctx: Context) -> _Probe:
        table = jax.random.normal(jax.random.key(0), (ctx.clients, PROBES), state.curvature.dtype)
        table = (table - jnp.mean(table, axis=0)) / jnp.std(table, axis=0)
        none = jnp.zeros((), jnp.int32)
        return _Probe(table[ctx.client], state.curvature, jnp.ones_like(state.curvature), none, none)

    def receive(state: _Probe, inbox: Inbox, ctx: Context) -> _Probe:
        values, curvature, mass = inbox.mix((state.values, state.curvature, state.mass))
        return replace(state, values=values, curvature=curvature, mass=mass, pushed=state.pushed + 1)

    def extend(state: _Probe, ctx: Context) -> _Probe:
        wanted = jnp.ceil(GROWTH * state.pushed).astype(jnp.int32)
        return replace(state, wanted=jnp.clip(wanted, state.pushed + 1, MOST_PUSHES))

    def is_mixed(state: _Probe, ctx: Context):
        close = jnp.sqrt(jnp.mean((state.values / state.mass) ** 2)) <= 1 / SHRINK
        return close | (state.pushed >= MOST_PUSHES)

    def leave(before: Any, state: _Probe, ctx: Context) -> Any:
        return replace(before, pushes=state.pushed, curvature=state.curvature / state.mass)

    push = Exchange(lambda state, ctx: (state.values, state.curvature, state.mass), receive, conserved=True)
    if pushes is not None:
        return Scope(Repeat(push, pushes, name="settings"), enter, leave)
    more = Repeat(push, MOST_PUSHES, times=lambda state, ctx: state.wanted - state.pushed, name="probes")
    search = Repeat(Sequence(Local(extend), more), at_most=64, until=is_mixed, name="settings")
    return Repeat(
        Scope(search, enter, leave),
        at_most=1,
        times=lambda state, ctx: (state.pushes == 0).astype(jnp.int32),
        name="search for pushes",
    )


def largest_curvature(
    product: Callable[[Float[Array, " d"]], Float[Array, " d"]], like: Float[Array, " d"], key: PRNGKeyArray
) -> Float[Array, ""]:
    """Estimate the largest |eigenvalue| of a symmetric matrix, from below, by ten products (power iteration)."""

    def once(_, held):
        vector, _ = held
        image = product(vector)
        size = jnp.linalg.norm(image)
        return image / jnp.where(size > 0, size, 1), size

    first = jax.random.normal(key, like.shape, like.dtype)
    return jax.lax.fori_loop(0, 10, once, (first / jnp.linalg.norm(first), jnp.zeros((), like.dtype)))[1]


def largest_stretch(
    forward: Callable[[Float[Array, " d"]], PyTree],
    backward: Callable[[PyTree], Float[Array, " d"]],
    like: Float[Array, " d"],
    key: PRNGKeyArray,
) -> Float[Array, ""]:
    """Estimate the norm of a linear map by ten products with it and its transpose, plus a tenth for safety."""

    def unit(tree: PyTree) -> tuple[PyTree, Float[Array, ""]]:
        size = norm(tree)
        return jax.tree.map(lambda leaf: leaf / jnp.where(size > 0, size, 1).astype(leaf.dtype), tree), size

    def once(_, held):
        image, size = unit(forward(held[0]))
        return unit(backward(image))[0], size.astype(like.dtype)

    first = jax.random.normal(key, like.shape, like.dtype)
    return 1.1 * jax.lax.fori_loop(0, 10, once, (first / jnp.linalg.norm(first), jnp.zeros((), like.dtype)))[1]


def norm(tree: PyTree) -> Float[Array, ""]:
    """Return the Euclidean norm, also where squares would underflow or overflow."""
    largest = jnp.max(jnp.stack([jnp.max(jnp.abs(leaf), initial=0) for leaf in jax.tree.leaves(tree)]))
    scale = jnp.where(largest > 0, largest, 1)
    return scale * jnp.asarray(optax.tree.norm(jax.tree.map(lambda leaf: leaf / scale.astype(leaf.dtype), tree)))
