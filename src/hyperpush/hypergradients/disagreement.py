"""Measure how far the peers' params differ, although no peer sees all of them."""

from dataclasses import replace
from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, PyTree

from hyperpush.base.status import AROUND, Reason
from hyperpush.hypergradients.base import HypergradientState
from hyperpush.hypergradients.tree_state import over
from hyperpush.programs import Average, Context, Node, Scope, Sequence
from hyperpush.programs.report import LARGEST, Report
from hyperpush.solving.settings import norm


class _State(eqx.Module):
    params: PyTree
    away: Float[Array, ""]  # ‖x_i − x̄‖ in units of ‖x̄‖, later its root mean square


def append_disagreement(program: Node) -> Node:
    """Return the program with two averages along a tree that measure the disagreement of the clients' params.

    If the disagreement is more than 0.02 of the mean's norm, the report says that params are unsolved. Params that
    agree may still be far from the inner solution.
    """

    def enter(state: HypergradientState, ctx: Context) -> _State:
        return _State(state.params, jnp.zeros(()))

    def take_mean(state: _State, mean: Float[Array, " d"], mass: Any, ctx: Context) -> _State:
        return replace(state, away=over(norm(ravel_pytree(state.params)[0] - mean), norm(mean)))

    def take_square(state: _State, mean: Float[Array, ""], mass: Any, ctx: Context) -> _State:
        return replace(state, away=jnp.sqrt(mean))

    def leave(before: HypergradientState, state: _State, ctx: Context) -> HypergradientState:
        report = Report.of(Reason.FIXED_LENGTH) if before.report is None else before.report
        passes = (state.away <= AROUND) | (report.reason > Reason.FIXED_LENGTH)
        reason = jnp.where(passes, report.reason, Reason.UNSOLVED)
        return replace(before, report=Report.of(reason, report.error).judged(-1, state.away, -1))

    vector = Average(lambda state, ctx: (ravel_pytree(state.params)[0], jnp.ones(())), take_mean, rounds=1, by="tree")
    square = Average(lambda state, ctx: (_square(state.away), jnp.ones(())), take_square, rounds=1, by="tree")
    return Sequence(program, Scope(Sequence(vector, square), enter, leave), appended=True)


def _square(number: Float[Array, ""]) -> Float[Array, ""]:
    return jnp.minimum(number, LARGEST**0.5) ** 2
