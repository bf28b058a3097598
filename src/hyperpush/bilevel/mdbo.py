"""MDBO: momentum and gradient tracking on both levels."""

import abc
from dataclasses import replace
from typing import Any, ClassVar

import equinox as eqx
import jax
from jaxtyping import PyTree

from hyperpush.bilevel.algorithm import LOOP, Bilevel
from hyperpush.bilevel.inverse import ConjugateGradients, Inverse, check_estimates, down, own_slopes
from hyperpush.bilevel.steps import Step, check_step, step_at
from hyperpush.checks import positive, whole
from hyperpush.errors import InvalidInput
from hyperpush.estimators.state import Declaration
from hyperpush.problem import Problem
from hyperpush.program import Context, Exchange, Inbox, Node, Repeat, Within


class _State(eqx.Module):
    params: PyTree
    hyper: PyTree
    estimates: tuple[PyTree, PyTree]  # a, b
    trackers: tuple[PyTree, PyTree]  # s, r


DECLARATION = Declaration(
    network="undirected",
    target="local: the mean of hyper-gradients through own Hessians at the common inner solution",
    sends="hypers, params and a tracker of each",
    matrices=False,
    paper="Gao, Gu and Thai, On the convergence of distributed stochastic bilevel optimization over a network",
    needs="undirected",
    fixed_point="x_M",
)


class TrackedMomentum(eqx.Module):
    """What MDBO and VRDBO share: all but how they estimate.

    x⁺ = x + η(Wx − β₁s − x),  y⁺ = y + η(Wy − β₂r − y),  s⁺ = Ws + a⁺ − a,  r⁺ = Wr + b⁺ − b
    """

    power: eqx.AbstractClassVar[int]  # an old estimate is forgotten at α·η^power

    iterations: int = eqx.field(static=True)
    outer_step: Step = eqx.field(static=True)  # β₁
    inner_step: Step = eqx.field(static=True)  # β₂
    rate: Step = eqx.field(static=True, default=1.0)  # η
    outer_momentum: float = eqx.field(static=True, converter=float, default=1.0)  # α₁
    inner_momentum: float = eqx.field(static=True, converter=float, default=1.0)  # α₂
    inverse: Inverse = ConjugateGradients()
    batch: int | None = eqx.field(static=True, default=None)

    def __check_init__(self):
        name = type(self).__name__
        whole(f"{name}.iterations", self.iterations, least=0)
        for step in ("outer_step", "inner_step", "rate"):
            check_step(f"{name}.{step}", getattr(self, step))
        largest = self.rate(0) if callable(self.rate) else self.rate
        for momentum in ("outer_momentum", "inner_momentum"):
            alpha = positive(f"{name}.{momentum}", getattr(self, momentum))
            if alpha * largest**self.power > 1:
                eta = "rate" if self.power == 1 else f"rate^{self.power}"
                raise InvalidInput(f"{name}.{momentum}", alpha, f"a number with {momentum}·{eta} at most 1")
        check_estimates(name, self.inverse, self.batch)

    @abc.abstractmethod
    def renewed(self, kept: Any, forget: tuple[Any, Any], estimate: Any, new: Any, old: Any) -> tuple[PyTree, PyTree]:
        """(a, b) at the point `new`; `estimate(point)` gives estimates on one and the same batch."""

    def program(self, problem: Problem) -> Node:
        def enter(state: Bilevel, ctx: Context) -> _State:
            first = own_slopes(problem, self.inverse, state.params, state.hyper, ctx.data, self.batch, ctx.key)
            return _State(state.params, state.hyper, first, first)

        def receive(state: _State, inbox: Inbox, ctx: Context) -> _State:
            rate = step_at(self.rate, ctx.round)
            steps = step_at(self.outer_step, ctx.round), step_at(self.inner_step, ctx.round)
            at = (state.hyper, state.params)
            mixed, trackers = inbox.mix((at, state.trackers))
            goal = tuple(map(down, mixed, state.trackers, steps))
            hyper, params = jax.tree.map(lambda z, to: (z + rate * (to - z)).astype(z.dtype), at, goal)

            def estimate(point: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
                return own_slopes(problem, self.inverse, *point, ctx.data, self.batch, ctx.key)

            forget = self.outer_momentum * rate**self.power, self.inner_momentum * rate**self.power
            estimates = self.renewed(state.estimates, forget, estimate, (params, hyper), (state.params, state.hyper))
            trackers = jax.tree.map(lambda s, new, old: s + new - old, trackers, estimates, state.estimates)
            return _State(params, hyper, estimates, trackers)

        def send(state: _State, ctx: Context):
            return (state.hyper, state.params), state.trackers

        return Within(
            Repeat(Exchange(send, receive, weights="gossip"), self.iterations, name=LOOP),
            enter,
            leave=lambda before, state, ctx: replace(before, params=state.params, hyper=state.hyper),
        )


class MDBO(TrackedMomentum):
    """a⁺ = (1 − α₁η)a + α₁η h_i(x⁺, y⁺) and b⁺ = (1 − α₂η)b + α₂η ∂_y g_i(x⁺, y⁺), tracked by s and r on both levels:

        x⁺ = x + η(Wx − β₁s − x),  y⁺ = y + η(Wy − β₂r − y),  s⁺ = Ws + a⁺ − a,  r⁺ = Wr + b⁺ − b

    x are the hypers and y the params of a client, g its inner cost, h_i = ∂_xF_i − J_i H_i^{-1} ∂_yF_i with its own
    Hessian. β₁ is `outer_step`, β₂ `inner_step`, η `rate`, α₁ `outer_momentum` and α₂ `inner_momentum`.
    Gao, Gu, Thai 2022.
    """

    declares: ClassVar[Declaration] = DECLARATION
    power: ClassVar[int] = 1

    def renewed(self, kept: Any, forget: tuple[Any, Any], estimate: Any, new: Any, old: Any) -> tuple[PyTree, PyTree]:
        above, below = (
            jax.tree.map(lambda k, n, f=f: (k + f * (n - k)).astype(k.dtype), *pair)
            for f, *pair in zip(forget, kept, estimate(new), strict=True)
        )
        return above, below
