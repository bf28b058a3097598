"""Judge the start or end point of an algorithm: its params as they are, and the hypergradient at solved params."""

from dataclasses import replace
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, PyTree

from hyperpush.hypergradients.base import HypergradientState, outer_gradient_shares
from hyperpush.hypergradients.own_params import own_solution, own_value
from hyperpush.hypergradients.tree_cg import TreeCG
from hyperpush.inner.automatic import AutomaticInner
from hyperpush.inner.base import InnerSolver, InnerState
from hyperpush.programs import Context, Local, Node, Repeat, Scope, Sequence
from hyperpush.programs.report import Report
from hyperpush.solving.common import choose
from hyperpush.solving.settings import norm
from hyperpush.task.problem import Problem

# End points of the papers other than x_G, the minimizer of the mean outer cost (algorithms/base.py).
OtherPoint = Literal["", "x_L", "x_M"]


class Given(eqx.Module):
    """One client's part of a point to judge.

    Args:
        params: x_i.
        hyper: λ_i.
        start: ‖params before training‖.
        size: ‖v_i‖ at the start of the run, or the norm of the mean v_i if hypers are common; 0 if unknown.
        judge: True judges the params as they are before solving. False only solves and estimates.
        look: True also computes the gradient for x_L or x_M.
    """

    params: PyTree
    hyper: PyTree
    start: Float[Array, "*clients"]
    size: Float[Array, "*clients"]
    judge: Bool[Array, "*clients"]
    look: Bool[Array, "*clients"]


class Ending(eqx.Module):
    """A client's state while a point is judged, with the fields of `Given`.

    Args:
        params: x_i as given, later params that solve the inner problem for λ_i.
        solved: True once `params` are solved.
        reported: Report on the params as given.
        training: Report of the inner solver.
        estimate: Report of the estimate at solved params.
        value: v_i at solved params.
        terms: Sum of the norms of the two terms of v_i.
        other: Client i's part of the gradient that vanishes at x_L or x_M; zeros without `look`.
    """

    params: PyTree
    hyper: PyTree
    start: Float[Array, "*clients"]
    size: Float[Array, "*clients"]
    judge: Bool[Array, "*clients"]
    look: Bool[Array, "*clients"]
    solved: Bool[Array, "*clients"]
    reported: Report
    training: Report
    estimate: Report
    value: PyTree
    terms: Float[Array, "*clients"]
    other: PyTree


class EndJudge(eqx.Module):
    """The program that judges a point: from states `Given` to `Ending`.

    It solves the inner problem from the given params and estimates the hypergradient there with TreeCG. Where
    `state.judge` is set, TreeCG first judges the params as they are. Both estimates share one loop body, so one
    compiled program serves the start and the end of a run.
    """

    solver: InnerSolver
    checker: TreeCG
    other: OtherPoint = eqx.field(static=True, default="")

    def program(self, problem: Problem) -> Node:
        def enter(state: Given, ctx: Context) -> Ending:
            zeros, none, zero = optax.tree.zeros_like(state.hyper), Report.none(), jnp.zeros_like(state.start)
            return Ending(
                **vars(state),
                solved=~state.judge,
                reported=none,
                training=none,
                estimate=none,
                value=zeros,
                terms=zero,
                other=zeros,
            )

        def to_solver(state: Ending, ctx: Context) -> InnerState:
            return InnerState(state.params, state.hyper)

        def from_solver(before: Ending, found: InnerState, ctx: Context) -> Ending:
            assert found.report is not None
            return replace(before, params=found.params, training=found.report)

        def to_checker(state: Ending, ctx: Context) -> HypergradientState:
            later = (state.size > 0).astype(jnp.int32)
            known = {"report": Report.none(), "start": state.start, "size": state.size, "outer": later}
            return HypergradientState(state.params, state.hyper, state.value, **known)

        def from_checker(before: Ending, found: HypergradientState, ctx: Context) -> Ending:
            assert found.report is not None
            direct = outer_gradient_shares(problem, found, ctx)[1]
            terms = norm(direct) + norm(jax.tree.map(jnp.subtract, direct, found.value))
            reported = choose(before.solved, before.reported, found.report)
            return replace(
                before, reported=reported, estimate=found.report, value=found.value, terms=terms, solved=_true()
            )

        solve = Repeat(
            Scope(self.solver.program(problem), to_solver, from_solver), 1, times=_once_if("solved"), name="solve"
        )
        estimate = Scope(self.checker.program(problem), to_checker, from_checker)
        loop = Repeat(Sequence(solve, estimate), 2, times=_passes, name="ending")
        body = loop if not self.other else Sequence(loop, self._look_at_other(problem))
        return Scope(body, enter, lambda before, state, ctx: state)

    def _look_at_other(self, problem: Problem) -> Node:
        def look(state: Ending, ctx: Context) -> Ending:
            params = state.params
            if self.other == "x_L":
                params = own_solution(problem, params, state.hyper, ctx)
            return replace(state, other=own_value(problem, params, state.hyper, ctx))

        return Repeat(Local(look), 1, times=_once_if("look"), name="other point")


def solver_for(network: Any, engine: Any, task: Any) -> InnerSolver:
    """Return the inner solver that solves a point before its hypergradient is judged."""
    return AutomaticInner().bind(network, engine, task)


def _once_if(name: str) -> Any:
    return lambda state, ctx: jnp.asarray(getattr(state, name), jnp.int32)


def _passes(state: Ending, ctx: Context) -> Int[Array, ""]:
    return jnp.where(state.judge, 2, 1)


def _true() -> Bool[Array, ""]:
    return jnp.ones((), bool)
