"""SVR-INTERACT: INTERACT on mini-batches, with corrected estimates instead of new ones."""

from dataclasses import replace
from typing import ClassVar

import equinox as eqx
import jax
from jaxtyping import PyTree

from hyperpush.algorithms.base import BilevelState, descend, track
from hyperpush.algorithms.interact import INTERACT
from hyperpush.algorithms.inverse import ImplicitDescent, Neumann, Point, correct
from hyperpush.base.ranges import Count
from hyperpush.methods.base import MethodInfo
from hyperpush.programs import Context, Exchange, Inbox, Node
from hyperpush.task.problem import Problem


class _State(eqx.Module):
    params: PyTree
    hyper: PyTree
    estimates: tuple[PyTree, PyTree]  # p of h_i and v of ∂_y g_i
    tracker: PyTree  # u, which tracks the mean of the p


class SVRINTERACT(ImplicitDescent):
    """INTERACT on mini-batches, with corrected estimates instead of new ones.

    Each client has its own params y; the hypers x become common. It keeps estimates p of its own hypergradient h_i and
    v of ∂_y g_i. The symbols h_i, g_i, W and u are those of `INTERACT` (Liu et al., arXiv:2207.13283):

        x⁺ = Wx − αu,   y⁺ = y − βv,   u⁺ = Wu + p⁺ − p

    In every `period`-th iteration p and v are computed on all examples. In the other iterations
    p⁺ = p + h_i(x⁺, y⁺) − h_i(x, y) with both points on the same batch, and v is updated in the same way.

    **Use it** instead of `INTERACT` where clients have many examples. **Avoid it** where the inner solution must be
    common: it ends at x_L, where the mean of the h_i is zero.

    Departures from the paper:

    1. `inverse` is conjugate gradients on all examples by default. On all examples a `Neumann` takes all its terms.

    Args:
        steps: Iterations, one round of gossip each. With 0 all values stay as they are.
        outer_step_size: α, above 0; a number or a schedule by iteration. Start well below β.
        inner_step_size: β, above 0; a number or a schedule by iteration. Constant steps need β < 2/λ_max(H_i).
        period: Iterations from one estimate on all examples to the next, at least 1. 1 takes all examples in every
            iteration; √N suits N examples.
        inverse: Method that applies H_i⁻¹: `ConjugateGradients(steps)` or `Neumann(terms, step_size)`.
        batch_size: Examples per estimate, drawn anew each time; None uses all. A number needs `inverse=Neumann(…)`.

    Raises:
        InvalidInput: An option is out of range; the message names it and what is allowed.

    Example:
        >>> import hyperpush as hp
        >>> from hyperpush.tasks.quadratic import outer_fixed_points
        >>> task = hp.tasks.quadratic(4, seed=0, common=True)
        >>> method = hp.algorithms.SVRINTERACT(steps=400, outer_step_size=0.05, inner_step_size=0.15, period=10)
        >>> found = hp.solve(task, method, hp.networks.Ring(4), key=0)
        >>> bool(abs(found.hypers - outer_fixed_points(task.train, task.validation)["x_L"]).max() < 1e-3)
        True
    """

    info: ClassVar[MethodInfo] = replace(
        INTERACT.info, example={"steps": 4, "outer_step_size": 0.05, "inner_step_size": 0.1, "period": 2}
    )

    period: Count = eqx.field(static=True)

    def program(self, problem: Problem) -> Node:
        inverse = self.inverse.with_all_terms() if isinstance(self.inverse, Neumann) else self.inverse
        on_all_examples = replace(self, inverse=inverse, batch_size=None)

        def enter(state: BilevelState, ctx: Context) -> _State:
            estimates = on_all_examples.own_gradients(problem, (state.params, state.hyper), ctx)
            return _State(state.params, state.hyper, estimates, estimates[0])

        def receive(state: _State, inbox: Inbox, ctx: Context) -> _State:
            outer_rate, inner_rate = self.rates(ctx.round)
            mixed, tracker = inbox.mix((state.hyper, state.tracker))
            hyper = descend(mixed, state.tracker, outer_rate)
            params = descend(state.params, state.estimates[1], inner_rate)
            old, new = (state.params, state.hyper), (params, hyper)

            def estimate(point: Point) -> tuple[PyTree, PyTree]:
                return self.own_gradients(problem, point, ctx)

            estimates = jax.lax.cond(
                (ctx.round + 1) % self.period == 0,
                lambda: on_all_examples.own_gradients(problem, new, ctx),
                lambda: correct(estimate, state.estimates, new, old),
            )
            return _State(params, hyper, estimates, track(tracker, estimates[0], state.estimates[0]))

        gossip = Exchange(lambda state, ctx: (state.hyper, state.tracker), receive, weights="gossip")
        return self.iterate(gossip, enter)
