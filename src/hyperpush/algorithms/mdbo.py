"""MDBO: momentum and gradient tracking on both levels."""

from collections.abc import Callable
from typing import Any, ClassVar

import equinox as eqx
from jaxtyping import PyTree

from hyperpush.algorithms.base import BilevelState, descend, move_towards, track
from hyperpush.algorithms.inverse import ImplicitDescent, Point
from hyperpush.base.errors import InvalidInput
from hyperpush.base.numbers import as_number
from hyperpush.base.ranges import Positive
from hyperpush.base.schedules import Rate, first_number, step_size_at
from hyperpush.methods.base import MethodInfo
from hyperpush.programs import Context, Exchange, Inbox, Node
from hyperpush.task.problem import Problem


class _State(eqx.Module):
    params: PyTree
    hyper: PyTree
    estimates: tuple[PyTree, PyTree]  # a of h_i and b of ∂_y g_i
    trackers: tuple[PyTree, PyTree]  # s and r, which track the clients' mean a and b


class MDBO(ImplicitDescent):
    """Momentum and gradient tracking on both levels.

    Clients share the hypers x and the params y. Client i has the inner cost g_i and the outer cost F_i, with
    H_i = ∂²_yy g_i and J_i = ∂²_xy g_i. Its hypergradient is h_i = ∂_xF_i − J_i H_i⁻¹ ∂_yF_i. It keeps moving averages
    a of h_i and b of ∂_y g_i, and trackers s and r of the clients' mean a and b. With gossip weights W, an iteration is
    (Gao, Gu and Thai, arXiv:2206.15025)

        x⁺ = x + η(Wx − β₁s − x),          y⁺ = y + η(Wy − β₂r − y)
        a⁺ = (1 − α₁η)a + α₁η h_i(x⁺, y⁺),  b⁺ = (1 − α₂η)b + α₂η ∂_y g_i(x⁺, y⁺)
        s⁺ = Ws + a⁺ − a,                  r⁺ = Wr + b⁺ − b

    **Use it** on undirected networks of clients with similar costs, with mini-batches. **Avoid it** if clients' costs
    differ: each client uses its own Hessian at the common params. So the method ends at x_M, where the mean of the h_i
    is zero, and not at the minimizer of the mean outer cost.

    Departures from the paper:

    1. `inverse` is conjugate gradients on all examples by default. The paper takes a `Neumann` series.

    Args:
        steps: Iterations, one round of gossip each. With 0 all values stay as they are.
        outer_step_size: β₁, above 0; a number or a schedule by iteration. Start well below β₂.
        inner_step_size: β₂, above 0; a number or a schedule by iteration. Constant steps need β₂ < 2/λ_max(H_i).
        step_scale: η, above 0; a number or a schedule by iteration. 1 takes full steps.
        outer_momentum: α₁, above 0 with α₁η ≤ 1. α₁η = 1 keeps no momentum.
        inner_momentum: α₂, above 0 with α₂η ≤ 1. α₂η = 1 keeps no momentum.
        inverse: Method that applies H_i⁻¹: `ConjugateGradients(steps)` or `Neumann(terms, step_size)`.
        batch_size: Examples per estimate, drawn anew each time; None uses all. A number needs `inverse=Neumann(…)`.

    Raises:
        InvalidInput: An option is out of range; the message names it and what is allowed.

    Example:
        Clients share the inner solution but each uses its own Hessian, so they end at x_M.

        >>> import hyperpush as hp
        >>> from hyperpush.tasks.quadratic import outer_fixed_points
        >>> task = hp.tasks.quadratic(4, seed=0, common=True)
        >>> method = hp.algorithms.MDBO(steps=500, outer_step_size=0.05, inner_step_size=0.1, step_scale=0.7)
        >>> found = hp.solve(task, method, hp.networks.Ring(4), key=0)
        >>> bool(abs(found.hypers - outer_fixed_points(task.train, task.validation)["x_M"]).max() < 1e-3)
        True
    """

    info: ClassVar[MethodInfo] = MethodInfo(
        network="undirected",
        target="local",
        sends="hypers, params and a tracker of each",
        paper="Gao, Gu and Thai, On the convergence of distributed stochastic bilevel optimization algorithms over a "
        "network, arXiv:2206.15025",
        note="the mean of hypergradients through own Hessians at the common inner solution",
        fixed_point="x_M",
        example={"steps": 3, "outer_step_size": 0.05, "inner_step_size": 0.1, "step_scale": 0.7},
    )
    power: ClassVar[int] = 1  # an old estimate has weight 1 − α·η^power

    step_scale: Rate = eqx.field(converter=as_number, default=1.0)
    outer_momentum: Positive = eqx.field(converter=as_number, default=1.0)
    inner_momentum: Positive = eqx.field(converter=as_number, default=1.0)

    def __check_init__(self):
        eta = first_number(self.step_scale)
        for option, alpha in (("outer_momentum", self.outer_momentum), ("inner_momentum", self.inner_momentum)):
            # Traced numbers were checked before tracing.
            if eta is not None and isinstance(alpha, float) and alpha * eta**self.power > 1:
                scale = "step_scale" if self.power == 1 else f"step_scale^{self.power}"
                raise InvalidInput(
                    f"{type(self).__name__}.{option}", alpha, f"a number with {option}·{scale} at most 1"
                )

    def renew(
        self, estimate: Callable[[Point], PyTree], kept: PyTree, new: Point, old: Point, shares: tuple[Any, Any]
    ) -> tuple[PyTree, PyTree]:
        """Return (a, b) at the point `new`; every call of `estimate(point)` uses the same batch."""
        above, below = map(move_towards, kept, estimate(new), shares)
        return above, below

    def program(self, problem: Problem) -> Node:
        def enter(state: BilevelState, ctx: Context) -> _State:
            first = self.own_gradients(problem, (state.params, state.hyper), ctx)
            return _State(state.params, state.hyper, first, first)

        def send(state: _State, ctx: Context) -> PyTree:
            return (state.hyper, state.params), state.trackers

        def receive(state: _State, inbox: Inbox, ctx: Context) -> _State:
            eta, (at, _) = step_size_at(self.step_scale, ctx.round), send(state, ctx)
            mixed, trackers = inbox.mix(send(state, ctx))
            goal = tuple(map(descend, mixed, state.trackers, self.rates(ctx.round)))
            hyper, params = move_towards(at, goal, eta)
            shares = self.outer_momentum * eta**self.power, self.inner_momentum * eta**self.power
            estimates = self.renew(
                lambda point: self.own_gradients(problem, point, ctx),
                state.estimates,
                (params, hyper),
                (state.params, state.hyper),
                shares,
            )
            return _State(params, hyper, estimates, track(trackers, estimates, state.estimates))

        return self.iterate(Exchange(send, receive, weights="gossip"), enter)
