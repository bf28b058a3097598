"""The end of a loop that looks at exact averages, decided by one client for all.

An average along a tree is the same to the last bit everywhere. What clients compute from it may differ by rounding:
their processors and compilers need not be alike. Who stopped a step earlier would leave the others waiting.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PyTree

from hyperpush.programs.nodes import Average, Context, State

ROOT = 0  # the root of every tree


def decide_at_root(average: Average, until: Callable[[State, Context], Bool[Array, ""]], stays: bool = True) -> Average:
    """The same exact average, whose message also brings what the root thinks of the end: `state.ended`, for all alike.

    A loop around it takes `until=has_ended` and `common=True`. The root's answer to `until` rides in the next message,
    as one number more. So the loop takes one average more than the root alone would.

    Args:
        average: An average by `"tree"` or `"exact"`, on states with a field `ended`.
        until: `until(state, context)`; only the root's answer counts.
        stays: Whether the state stays as the root saw it when it answered; otherwise the last average counts too.
    """

    def get(state: State, ctx: Context) -> tuple[PyTree, Float[Array, ""]]:
        value, mass = average.get(state, ctx)
        return (value, jnp.where((ctx.client == ROOT) & until(state, ctx), mass, 0)), mass

    def put(state: State, means: tuple[PyTree, Float[Array, ""]], mass: Float[Array, ""], ctx: Context) -> State:
        mean, answer = means
        after = average.put(state, mean, mass, ctx)
        if stays:
            after = jax.tree.map(lambda a, b: a if a is b else jnp.where(answer > 0, a, b), state, after)
        return replace(after, ended=answer > 0)

    def answer(state: State, means: tuple[PyTree, Float[Array, ""]], ctx: Context) -> PyTree:
        assert average.answer is not None
        return average.answer(state, means[0], ctx), means[1]

    return replace(average, get=get, put=put, answer=None if average.answer is None else answer)


def has_ended(state: Any, ctx: Context) -> Bool[Array, ""]:
    """Whether the root has decided to end."""
    return state.ended
