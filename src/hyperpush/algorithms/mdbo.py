"""MDBO: momentum and gradient tracking on both levels."""

import abc
from dataclasses import replace
from typing import Any, ClassVar

import equinox as eqx
import jax
from jaxtyping import PyTree

from hyperpush.algorithms.base import LOOP, Algorithm, BilevelState
from hyperpush.algorithms.inverse import ConjugateGradients, Inverse, check_estimates, down, own_slopes
from hyperpush.algorithms.steps import check_step_sizes, first_number
from hyperpush.checks import check_integer, check_positive
from hyperpush.errors import InvalidInput
from hyperpush.method import MethodInfo, Number, as_number
from hyperpush.optimizers import StepSize, step_size_at
from hyperpush.problem import Problem
from hyperpush.programs import Context, Exchange, Inbox, Node, Repeat, Scope


class _State(eqx.Module):
    params: PyTree
    hyper: PyTree
    estimates: tuple[PyTree, PyTree]  # a, b
    trackers: tuple[PyTree, PyTree]  # s, r


INFO = MethodInfo(
    network="undirected",
    target="local",
    sends="hypers, params and a tracker of each",
    paper="Gao, Gu and Thai, On the convergence of distributed stochastic bilevel optimization algorithms over a "
    "network, arXiv:2206.15025",
    note="the mean of hypergradients through own Hessians at the common inner solution",
    fixed_point="x_M",
    example={"steps": 3, "outer_step_size": 0.05, "inner_step_size": 0.1, "step_scale": 0.7},
)


class TrackedMomentum(Algorithm):
    """What MDBO and VRDBO share: all but how they estimate.

    x⁺ = x + η(Wx − β₁s − x),  y⁺ = y + η(Wy − β₂r − y),  s⁺ = Ws + a⁺ − a,  r⁺ = Wr + b⁺ − b
    """

    power: eqx.AbstractClassVar[int]  # an old estimate is forgotten at α·η^power

    steps: int = eqx.field(static=True)
    outer_step_size: StepSize = eqx.field(converter=as_number)  # β₁
    inner_step_size: StepSize = eqx.field(converter=as_number)  # β₂
    step_scale: StepSize = eqx.field(converter=as_number, default=1.0)  # η
    outer_momentum: Number = eqx.field(converter=as_number, default=1.0)  # α₁
    inner_momentum: Number = eqx.field(converter=as_number, default=1.0)  # α₂
    inverse: Inverse = ConjugateGradients()
    batch_size: int | None = eqx.field(static=True, default=None)

    def __check_init__(self):
        name = type(self).__name__
        check_integer(f"{name}.steps", self.steps, minimum=0)
        check_step_sizes(self, "outer_step_size", "inner_step_size", "step_scale")
        for momentum in ("outer_momentum", "inner_momentum"):
            alpha = check_positive(f"{name}.{momentum}", getattr(self, momentum))
            eta = first_number(self.step_scale)
            # What is traced was checked before tracing.
            if eta is not None and isinstance(alpha, float) and alpha * eta**self.power > 1:
                scale = "step_scale" if self.power == 1 else f"step_scale^{self.power}"
                raise InvalidInput(f"{name}.{momentum}", alpha, f"a number with {momentum}·{scale} at most 1")
        check_estimates(name, self.inverse, self.batch_size)

    @abc.abstractmethod
    def renewed(self, kept: Any, forget: tuple[Any, Any], estimate: Any, new: Any, old: Any) -> tuple[PyTree, PyTree]:
        """(a, b) at the point `new`; `estimate(point)` gives estimates on one and the same batch."""

    def program(self, problem: Problem) -> Node:
        def enter(state: BilevelState, ctx: Context) -> _State:
            first = own_slopes(problem, self.inverse, state.params, state.hyper, ctx.data, self.batch_size, ctx.key)
            return _State(state.params, state.hyper, first, first)

        def receive(state: _State, inbox: Inbox, ctx: Context) -> _State:
            eta = step_size_at(self.step_scale, ctx.round)
            steps = step_size_at(self.outer_step_size, ctx.round), step_size_at(self.inner_step_size, ctx.round)
            at = (state.hyper, state.params)
            mixed, trackers = inbox.mix((at, state.trackers))
            goal = tuple(map(down, mixed, state.trackers, steps))
            hyper, params = jax.tree.map(lambda z, to: (z + eta * (to - z)).astype(z.dtype), at, goal)

            def estimate(point: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
                return own_slopes(problem, self.inverse, *point, ctx.data, self.batch_size, ctx.key)

            forget = self.outer_momentum * eta**self.power, self.inner_momentum * eta**self.power
            estimates = self.renewed(state.estimates, forget, estimate, (params, hyper), (state.params, state.hyper))
            trackers = jax.tree.map(lambda s, new, old: s + new - old, trackers, estimates, state.estimates)
            return _State(params, hyper, estimates, trackers)

        def send(state: _State, ctx: Context):
            return (state.hyper, state.params), state.trackers

        return Scope(
            Repeat(Exchange(send, receive, weights="gossip"), self.steps, name=LOOP),
            enter,
            leave=lambda before, state, ctx: replace(before, params=state.params, hyper=state.hyper),
        )


class MDBO(TrackedMomentum):
    """Momentum and gradient tracking on both levels.

    Clients share the hypers x and the params y. With its inner cost g_i and h_i = ∂_xF_i − J_i H_i⁻¹ ∂_yF_i through
    its own Hessian, a client keeps moving averages a, b and trackers s, r (Gao, Gu and Thai, arXiv:2206.15025):

        x⁺ = x + η(Wx − β₁s − x),          y⁺ = y + η(Wy − β₂r − y)
        a⁺ = (1 − α₁η)a + α₁η h_i(x⁺, y⁺),  b⁺ = (1 − α₂η)b + α₂η ∂_y g_i(x⁺, y⁺)
        s⁺ = Ws + a⁺ − a,                  r⁺ = Wr + b⁺ − b

    **Use it** on undirected networks of alike clients, with mini-batches. **Avoid it** with unlike clients: each uses
    its own Hessian at the common params, so it ends at x_M and not at the minimizer of the mean outer cost.

    Departures from the paper:

    1. `inverse` is conjugate gradients on all examples by default. The paper takes a `Neumann` series.

    Args:
        steps: Iterations, one round of gossip each.
        outer_step_size: β₁, above 0; a number or a schedule by iteration.
        inner_step_size: β₂, above 0; a number or a schedule by iteration.
        step_scale: η, above 0; a number or a schedule by iteration. 1 moves all the way.
        outer_momentum: α₁, above 0 with α₁η ≤ 1. α₁η = 1 keeps no momentum.
        inner_momentum: α₂, above 0 with α₂η ≤ 1. α₂η = 1 keeps no momentum.
        inverse: How H_i⁻¹ is applied: `ConjugateGradients(steps)` or `Neumann(terms, step_size)`.
        batch_size: Examples per estimate, drawn anew each time; None uses all. Numbers need `inverse=Neumann(…)`.

    Raises:
        InvalidInput: An option is out of range; the message names it and what is allowed.
    """

    info: ClassVar[MethodInfo] = INFO
    power: ClassVar[int] = 1

    def renewed(self, kept: Any, forget: tuple[Any, Any], estimate: Any, new: Any, old: Any) -> tuple[PyTree, PyTree]:
        above, below = (
            jax.tree.map(lambda k, n, f=f: (k + f * (n - k)).astype(k.dtype), *pair)
            for f, *pair in zip(forget, kept, estimate(new), strict=True)
        )
        return above, below
