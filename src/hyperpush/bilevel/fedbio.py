"""FedBiO and FedBiOAcc: local steps on both levels, hypers averaged by a server now and then."""

from dataclasses import replace
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, PyTree

from hyperpush.bilevel.algorithm import LOOP, Bilevel
from hyperpush.bilevel.inverse import ConjugateGradients, Inverse, check_estimates, down, own_slopes
from hyperpush.bilevel.pooled import common, mean
from hyperpush.bilevel.steps import Step, check_step, step_at
from hyperpush.bilevel.storm import at_both, recursive
from hyperpush.checks import whole
from hyperpush.errors import InvalidInput
from hyperpush.estimators.state import Declaration
from hyperpush.problem import Problem
from hyperpush.program import Context, Local, Node, Repeat, Sequence, Within


class _State(eqx.Module):
    params: PyTree
    hyper: PyTree
    estimates: tuple[PyTree, PyTree]  # ν, ω
    step: Int[Array, ""]  # local steps taken


class LocalSteps(eqx.Module):
    """What both do: local steps along ν and ω, of which the last of every iteration ends at the mean hyper."""

    iterations: int = eqx.field(static=True)
    outer_step: Step = eqx.field(static=True)
    inner_step: Step = eqx.field(static=True)
    local_steps: int = eqx.field(static=True, default=1)
    inverse: Inverse = ConjugateGradients()
    batch: int | None = eqx.field(static=True, default=None)

    def __check_init__(self):
        name = type(self).__name__
        whole(f"{name}.iterations", self.iterations, least=0)
        check_step(f"{name}.outer_step", self.outer_step)
        check_step(f"{name}.inner_step", self.inner_step)
        whole(f"{name}.local_steps", self.local_steps, least=1)
        check_estimates(name, self.inverse, self.batch)

    def estimated(self, problem: Problem, params: PyTree, hyper: PyTree, ctx: Context) -> tuple[PyTree, PyTree]:
        return own_slopes(problem, self.inverse, params, hyper, ctx.data, self.batch, ctx.key)

    def renewed(
        self, problem: Problem, state: _State, params: PyTree, hyper: PyTree, ctx: Context
    ) -> tuple[PyTree, PyTree]:
        """(ν, ω) after the step to (params, hyper)."""
        return self.estimated(problem, params, hyper, ctx)

    def ending(self) -> Node:
        """What else is averaged whenever the hypers are."""
        return Sequence()

    def program(self, problem: Problem) -> Node:
        def enter(state: Bilevel, ctx: Context) -> _State:
            zero = jax.tree.map(jnp.zeros_like, (state.hyper, state.params))
            return _State(state.params, state.hyper, zero, jnp.zeros((), jnp.int32))

        def begin(state: _State, ctx: Context) -> _State:
            return replace(state, estimates=self.estimated(problem, state.params, state.hyper, ctx))

        def goal(state: _State, ctx: Context) -> PyTree:
            return down(state.hyper, state.estimates[0], step_at(self.outer_step, state.step))

        def arrive(state: _State, hyper: PyTree, ctx: Context) -> _State:
            params = down(state.params, state.estimates[1], step_at(self.inner_step, state.step))
            return _State(params, hyper, self.renewed(problem, state, params, hyper, ctx), state.step + 1)

        def step(state: _State, ctx: Context) -> _State:
            return arrive(state, goal(state, ctx), ctx)

        meeting = Sequence(mean(goal, arrive), self.ending())
        alone = Repeat(Local(step), self.local_steps - 1, name="local steps")
        iteration = Sequence(alone, meeting) if self.local_steps > 1 else meeting
        return Within(
            Sequence(common("hyper"), Local(begin), self.ending(), Repeat(iteration, self.iterations, name=LOOP)),
            enter,
            leave=lambda before, state, ctx: replace(before, params=state.params, hyper=state.hyper),
        )


def declaration(sends: str) -> Declaration:
    return Declaration(
        network="a server, or any that can average exactly",
        target="local: the mean of own hyper-gradients at own inner solutions",
        sends=sends,
        matrices=False,
        paper="Li, Huang and Huang, Local stochastic bilevel optimization with momentum-based variance reduction",
        fixed_point="x_L",
    )


class FedBiO(LocalSteps):
    """x_i ← x_i − αh_i(x_i, y_i),  y_i ← y_i − β∂_y g_i(x_i, y_i), `local_steps` times; then x_i = mean of all x_k.

    x are the hypers and y the params of a client, g its inner cost, h_i its own hyper-gradient. α is `outer_step` and β
    `inner_step`, by local steps taken. Several local steps at a constant α leave an error of order α between unlike
    clients. Li, Huang, Huang 2022.
    """

    declares: ClassVar[Declaration] = declaration("hypers")


class FedBiOAcc(LocalSteps):
    """x_i ← x_i − αν_i,  y_i ← y_i − βω_i, `local_steps` times; then x_i and ν_i are those of all on average.

        ν⁺ = h_i(x⁺, y⁺) + (1 − c)(ν − h_i(x, y)), and ω alike with ∂_y g_i; both points on the same batch

    x are the hypers and y the params of a client, g its inner cost, h_i its own hyper-gradient. α is `outer_step`, β
    `inner_step` and c `forget`, by local steps taken; c falls like α² in the paper. Li, Huang, Huang 2022.
    """

    declares: ClassVar[Declaration] = declaration("hypers and their hyper-gradient")

    forget: Step = eqx.field(static=True, kw_only=True)

    def __check_init__(self):
        check_step("FedBiOAcc.forget", self.forget)
        first = self.forget(0) if callable(self.forget) else self.forget
        if first > 1:
            raise InvalidInput("FedBiOAcc.forget", first, "at most 1")

    def renewed(
        self, problem: Problem, state: _State, params: PyTree, hyper: PyTree, ctx: Context
    ) -> tuple[PyTree, PyTree]:
        def estimate(point: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
            return self.estimated(problem, *point, ctx)

        here, before = at_both(estimate, (params, hyper), (state.params, state.hyper))
        return recursive(state.estimates, here, before, step_at(self.forget, state.step))

    def ending(self) -> Node:
        return mean(
            lambda state, ctx: state.estimates[0],
            lambda state, average, ctx: replace(state, estimates=(average, state.estimates[1])),
        )
