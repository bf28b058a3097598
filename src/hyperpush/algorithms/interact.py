"""INTERACT: gradient tracking on the outer level, one inner problem per client."""

from typing import ClassVar

import equinox as eqx
from jaxtyping import PyTree

from hyperpush.algorithms.base import BilevelState, TwoLevelDescent, descend, track
from hyperpush.base.ranges import Count
from hyperpush.data.batches import full_batch
from hyperpush.hypergradients.local_implicit import own_hypergradient
from hyperpush.methods.base import MethodInfo
from hyperpush.programs import Context, Exchange, Inbox, Node
from hyperpush.task.problem import Problem


class _State(eqx.Module):
    params: PyTree
    hyper: PyTree
    gradient: PyTree  # h_i at the last point
    tracker: PyTree  # u, which tracks the mean of the h_i


class INTERACT(TwoLevelDescent):
    """Inner gradient descent and outer gradient tracking, with one inner problem per client.

    Each client has its own params y_i; the hypers x_i become common by gossip with doubly stochastic W. Client i has
    the inner cost g_i and the outer cost F_i, with H_i = ∂²_yy g_i and J_i = ∂²_xy g_i. Its hypergradient is
    h_i = ∂_xF_i − J_i H_i⁻¹ ∂_yF_i. The tracker u follows the mean of the h_i (Liu et al., arXiv:2207.13283):

        x⁺ = Wx − αu,   y⁺ = y − β ∂_y g_i(x, y),   u⁺ = Wu + h_i(x⁺, y⁺) − h_i(x, y)

    **Use it** on undirected networks with few examples per client: it takes all of them in every iteration. **Avoid
    it** with many (`SVRINTERACT`), or where the inner solution must be common (`MADSBO`).

    Departures from the paper:

    1. h_i is computed by conjugate gradients instead of an exact inverse.

    Args:
        steps: Iterations, one round of gossip each. With 0 all values stay as they are.
        outer_step_size: α, above 0; a number or a schedule by iteration. Start well below β and halve it if the run
            diverges.
        inner_step_size: β, above 0; a number or a schedule by iteration. Constant steps need β < 2/λ_max(H_i).
        inner_steps: Steps of conjugate gradients for h_i, at least 1. The number of params suffices.

    Raises:
        InvalidInput: An option is out of range; the message names it and what is allowed.

    Example:
        Clients end where the mean of their own hypergradients is zero, at x_L.

        >>> import hyperpush as hp
        >>> from hyperpush.tasks.quadratic import outer_fixed_points
        >>> task = hp.tasks.quadratic(4, seed=0, common=True)
        >>> method = hp.algorithms.INTERACT(steps=400, outer_step_size=0.05, inner_step_size=0.15)
        >>> found = hp.solve(task, method, hp.networks.Ring(4), key=0)
        >>> bool(abs(found.hypers - outer_fixed_points(task.train, task.validation)["x_L"]).max() < 1e-3)
        True
    """

    info: ClassVar[MethodInfo] = MethodInfo(
        network="undirected",
        target="local",
        sends="hypers and their tracker",
        paper="Liu et al., INTERACT: achieving low sample and communication complexities in decentralized bilevel "
        "learning over networks, arXiv:2207.13283",
        note="the mean of own hypergradients at own inner solutions",
        fixed_point="x_L",
        example={"steps": 3, "outer_step_size": 0.05, "inner_step_size": 0.1, "inner_steps": 5},
    )

    inner_steps: Count = eqx.field(static=True, default=20)

    def program(self, problem: Problem) -> Node:
        def hypergradient(params: PyTree, hyper: PyTree, ctx: Context) -> PyTree:
            batches = full_batch(ctx.data.train), full_batch(ctx.data.outer)
            return own_hypergradient(problem, params, hyper, *batches, self.inner_steps)

        def enter(state: BilevelState, ctx: Context) -> _State:
            own = hypergradient(state.params, state.hyper, ctx)
            return _State(state.params, state.hyper, own, own)

        def receive(state: _State, inbox: Inbox, ctx: Context) -> _State:
            outer_rate, inner_rate = self.rates(ctx.round)
            mixed, tracker = inbox.mix((state.hyper, state.tracker))
            hyper = descend(mixed, state.tracker, outer_rate)
            slope = problem.inner_gradient(state.params, state.hyper, full_batch(ctx.data.train))
            params = descend(state.params, slope, inner_rate)
            own = hypergradient(params, hyper, ctx)
            return _State(params, hyper, own, track(tracker, own, state.gradient))

        gossip = Exchange(lambda state, ctx: (state.hyper, state.tracker), receive, weights="gossip")
        return self.iterate(gossip, enter)
