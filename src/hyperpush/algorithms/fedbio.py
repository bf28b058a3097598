"""FedBiO and FedBiOAcc: local steps on both levels, hypers averaged by a server now and then."""

from dataclasses import replace
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, PyTree

from hyperpush.algorithms.base import LOOP, Algorithm, BilevelState
from hyperpush.algorithms.inverse import ConjugateGradients, Inverse, check_estimates, down, own_slopes
from hyperpush.algorithms.pooled import common, mean
from hyperpush.algorithms.steps import check_at_most_one, check_step_sizes
from hyperpush.algorithms.storm import at_both, recursive
from hyperpush.checks import check_integer
from hyperpush.method import MethodInfo, as_number
from hyperpush.optimizers import StepSize, step_size_at
from hyperpush.problem import Problem
from hyperpush.programs import Context, Local, Node, Repeat, Scope, Sequence


class _State(eqx.Module):
    params: PyTree
    hyper: PyTree
    estimates: tuple[PyTree, PyTree]  # ν, ω
    step: Int[Array, ""]  # local steps taken


class LocalSteps(Algorithm):
    """What both do: local steps along ν and ω, of which the last of every iteration ends at the mean hyper."""

    steps: int = eqx.field(static=True)
    outer_step_size: StepSize = eqx.field(converter=as_number)
    inner_step_size: StepSize = eqx.field(converter=as_number)
    local_steps: int = eqx.field(static=True, default=1)
    inverse: Inverse = ConjugateGradients()
    batch_size: int | None = eqx.field(static=True, default=None)

    def __check_init__(self):
        name = type(self).__name__
        check_integer(f"{name}.steps", self.steps, minimum=0)
        check_step_sizes(self, "outer_step_size", "inner_step_size")
        check_integer(f"{name}.local_steps", self.local_steps, minimum=1)
        check_estimates(name, self.inverse, self.batch_size)

    def estimated(self, problem: Problem, params: PyTree, hyper: PyTree, ctx: Context) -> tuple[PyTree, PyTree]:
        return own_slopes(problem, self.inverse, params, hyper, ctx.data, self.batch_size, ctx.key)

    def renewed(
        self, problem: Problem, state: _State, params: PyTree, hyper: PyTree, ctx: Context
    ) -> tuple[PyTree, PyTree]:
        """(ν, ω) after the step to (params, hyper)."""
        return self.estimated(problem, params, hyper, ctx)

    def ending(self) -> Node:
        """What else is averaged whenever the hypers are."""
        return Sequence()

    def program(self, problem: Problem) -> Node:
        def enter(state: BilevelState, ctx: Context) -> _State:
            zero = jax.tree.map(jnp.zeros_like, (state.hyper, state.params))
            return _State(state.params, state.hyper, zero, jnp.zeros((), jnp.int32))

        def begin(state: _State, ctx: Context) -> _State:
            return replace(state, estimates=self.estimated(problem, state.params, state.hyper, ctx))

        def goal(state: _State, ctx: Context) -> PyTree:
            return down(state.hyper, state.estimates[0], step_size_at(self.outer_step_size, state.step))

        def arrive(state: _State, hyper: PyTree, ctx: Context) -> _State:
            params = down(state.params, state.estimates[1], step_size_at(self.inner_step_size, state.step))
            return _State(params, hyper, self.renewed(problem, state, params, hyper, ctx), state.step + 1)

        def step(state: _State, ctx: Context) -> _State:
            return arrive(state, goal(state, ctx), ctx)

        meeting = Sequence(mean(goal, arrive), self.ending())
        alone = Repeat(Local(step), self.local_steps - 1, name="local steps")
        iteration = Sequence(alone, meeting) if self.local_steps > 1 else meeting
        return Scope(
            Sequence(common("hyper"), Local(begin), self.ending(), Repeat(iteration, self.steps, name=LOOP)),
            enter,
            leave=lambda before, state, ctx: replace(before, params=state.params, hyper=state.hyper),
        )


def info_of(sends: str, **more: Any) -> MethodInfo:
    """What both say of themselves; `more` are further options of the example."""
    return MethodInfo(
        network="server",
        target="local",
        sends=sends,
        paper="Li, Huang and Huang, Local stochastic bilevel optimization with momentum-based variance reduction, "
        "arXiv:2205.01608",
        note="the mean of own hypergradients at own inner solutions",
        fixed_point="x_L",
        example={"steps": 3, "outer_step_size": 0.05, "inner_step_size": 0.1, "local_steps": 2} | more,
    )


class FedBiO(LocalSteps):
    """Federated bilevel optimization: local steps on both levels, hypers averaged now and then.

    Each client has params y_i of its own; the hypers x_i become common. With its inner cost g_i and its own
    hypergradient h_i = ∂_xF_i − J_i H_i⁻¹ ∂_yF_i (Li, Huang and Huang, arXiv:2205.01608):

        repeat `local_steps` times:
            x_i ← x_i − α h_i(x_i, y_i),   y_i ← y_i − β ∂_y g_i(x_i, y_i)
        x_i ← mean of all x_k

    **Use it** where every client has an inner problem of its own and rounds are expensive. **Avoid it** where the inner
    solution must be common: it ends at x_L, not at the minimizer of the mean outer cost. Several local steps at a
    constant α leave an error of order α between unlike clients.

    Departures from the paper:

    1. `inverse` is conjugate gradients on all examples by default. The paper takes a `Neumann` series.

    Args:
        steps: Rounds with the server. With 0 hypers are averaged once.
        outer_step_size: α, above 0; a number or a schedule by local steps taken.
        inner_step_size: β, above 0; a number or a schedule by local steps taken.
        local_steps: Steps between two averages, at least 1.
        inverse: How H_i⁻¹ is applied: `ConjugateGradients(steps)` or `Neumann(terms, step_size)`.
        batch_size: Examples per estimate, drawn anew each time; None uses all. Numbers need `inverse=Neumann(…)`.

    Raises:
        InvalidInput: An option is out of range; the message names it and what is allowed.
    """

    info: ClassVar[MethodInfo] = info_of("hypers")


class FedBiOAcc(LocalSteps):
    """FedBiO with momentum-based variance reduction on both levels.

    Estimates ν of the own hypergradient h_i and ω of ∂_y g_i are corrected instead of computed anew (Li, Huang and
    Huang, arXiv:2205.01608). At the new point (x⁺, y⁺), both points on the same batch:

        x_i ← x_i − αν_i,   y_i ← y_i − βω_i
        ν⁺ = h_i(x⁺, y⁺) + (1 − c)(ν − h_i(x, y)),   ω alike with ∂_y g_i

    After `local_steps` of them x_i and ν_i become the means of all.

    **Use it** instead of `FedBiO` with mini-batches. **Avoid it** with all examples, where it only adds work.

    Departures from the paper:

    1. `inverse` is conjugate gradients on all examples by default. The paper takes a `Neumann` series.

    Args:
        steps: Rounds with the server. With 0 hypers and estimates are averaged once.
        outer_step_size: α, above 0; a number or a schedule by local steps taken.
        inner_step_size: β, above 0; a number or a schedule by local steps taken.
        local_steps: Steps between two averages, at least 1.
        inverse: How H_i⁻¹ is applied: `ConjugateGradients(steps)` or `Neumann(terms, step_size)`.
        batch_size: Examples per estimate, drawn anew each time; None uses all. Numbers need `inverse=Neumann(…)`.
        forget: c, above 0 and at most 1; a number or a schedule by local steps taken. 1 forgets all: `FedBiO`. The
            paper lets c fall like α².

    Raises:
        InvalidInput: An option is out of range; the message names it and what is allowed.
    """

    info: ClassVar[MethodInfo] = info_of("hypers and their hypergradient", forget=0.5)

    forget: StepSize = eqx.field(converter=as_number, kw_only=True)

    def __check_init__(self):
        check_step_sizes(self, "forget")
        check_at_most_one("FedBiOAcc.forget", self.forget)

    def renewed(
        self, problem: Problem, state: _State, params: PyTree, hyper: PyTree, ctx: Context
    ) -> tuple[PyTree, PyTree]:
        def estimate(point: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
            return self.estimated(problem, *point, ctx)

        here, before = at_both(estimate, (params, hyper), (state.params, state.hyper))
        return recursive(state.estimates, here, before, step_size_at(self.forget, state.step))

    def ending(self) -> Node:
        return mean(
            lambda state, ctx: state.estimates[0],
            lambda state, average, ctx: replace(state, estimates=(average, state.estimates[1])),
        )
