"""FedBiO: local steps on both levels; a server averages the hypers at intervals."""

from dataclasses import replace
from typing import ClassVar

import equinox as eqx
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int, PyTree

from hyperpush.algorithms.base import BilevelState, descend
from hyperpush.algorithms.inverse import ImplicitDescent, Point
from hyperpush.algorithms.pooled import average_fields, mean
from hyperpush.base.ranges import Count
from hyperpush.methods.base import MethodInfo
from hyperpush.programs import Context, Local, Node, Repeat, Sequence
from hyperpush.task.problem import Problem


class LocalState(eqx.Module):
    """A client's state between two averages of the hypers."""

    params: PyTree
    hyper: PyTree
    estimates: tuple[PyTree, PyTree]  # ν of h_i and ω of ∂_y g_i
    step: Int[Array, ""]  # number of local steps taken


class FedBiO(ImplicitDescent):
    """Federated bilevel optimization: local steps on both levels, hypers averaged at intervals.

    Each client has its own params y_i; the hypers x_i become common. Client i has the inner cost g_i and the outer
    cost F_i, with H_i = ∂²_yy g_i and J_i = ∂²_xy g_i. Its hypergradient is h_i = ∂_xF_i − J_i H_i⁻¹ ∂_yF_i. A round is
    (Li, Huang and Huang, arXiv:2205.01608)

        repeat `local_steps` times:
            x_i ← x_i − α h_i(x_i, y_i),   y_i ← y_i − β ∂_y g_i(x_i, y_i)
        x_i ← mean of all x_k

    **Use it** where every client has its own inner problem and rounds are expensive. **Avoid it** where the inner
    solution must be common. It ends at x_L, where the mean of the h_i is zero, not at the minimizer of the mean outer
    cost. If clients' costs differ, several local steps at a constant α leave an error of order α.

    Departures from the paper:

    1. `inverse` is conjugate gradients on all examples by default. The paper takes a `Neumann` series.

    Args:
        steps: Rounds with the server. With 0 hypers are averaged once.
        outer_step_size: α, above 0; a number or a schedule by local steps taken. Start well below β.
        inner_step_size: β, above 0; a number or a schedule by local steps taken. Constant steps need β < 2/λ_max(H_i).
        local_steps: Steps between two averages, at least 1.
        inverse: Method that applies H_i⁻¹: `ConjugateGradients(steps)` or `Neumann(terms, step_size)`.
        batch_size: Examples per estimate, drawn anew each time; None uses all. A number needs `inverse=Neumann(…)`.

    Raises:
        InvalidInput: An option is out of range; the message names it and what is allowed.

    Example:
        >>> import hyperpush as hp
        >>> from hyperpush.tasks.quadratic import outer_fixed_points
        >>> task = hp.tasks.quadratic(4, seed=0, common=True)
        >>> method = hp.algorithms.FedBiO(steps=200, outer_step_size=0.1, inner_step_size=0.2)
        >>> found = hp.solve(task, method, hp.networks.FullyConnected(4), key=0)
        >>> bool(abs(found.hypers - outer_fixed_points(task.train, task.validation)["x_L"]).max() < 1e-3)
        True
    """

    info: ClassVar[MethodInfo] = MethodInfo(
        network="server",
        target="local",
        sends="hypers",
        paper="Li, Huang and Huang, Local stochastic bilevel optimization with momentum-based variance reduction, "
        "arXiv:2205.01608",
        note="the mean of own hypergradients at own inner solutions",
        fixed_point="x_L",
        example={"steps": 3, "outer_step_size": 0.05, "inner_step_size": 0.1, "local_steps": 2},
    )

    local_steps: Count = eqx.field(static=True, default=1)

    def renew(self, problem: Problem, state: LocalState, new: Point, ctx: Context) -> tuple[PyTree, PyTree]:
        """Return the estimates ν of h_i and ω of ∂_y g_i after the step to the point `new`."""
        return self.own_gradients(problem, new, ctx)

    def average_estimates(self) -> Node:
        """Return the node that averages estimates whenever hypers are averaged; empty for `FedBiO`."""
        return Sequence()

    def program(self, problem: Problem) -> Node:
        def enter(state: BilevelState, ctx: Context) -> LocalState:
            zero = optax.tree.zeros_like((state.hyper, state.params))
            return LocalState(state.params, state.hyper, zero, jnp.zeros((), jnp.int32))

        def begin(state: LocalState, ctx: Context) -> LocalState:
            return replace(state, estimates=self.own_gradients(problem, (state.params, state.hyper), ctx))

        def goal(state: LocalState, ctx: Context) -> PyTree:
            return descend(state.hyper, state.estimates[0], self.rates(state.step)[0])

        def arrive(state: LocalState, hyper: PyTree, ctx: Context) -> LocalState:
            params = descend(state.params, state.estimates[1], self.rates(state.step)[1])
            return LocalState(params, hyper, self.renew(problem, state, (params, hyper), ctx), state.step + 1)

        def step(state: LocalState, ctx: Context) -> LocalState:
            return arrive(state, goal(state, ctx), ctx)

        # The last of the local steps ends at the mean hyper.
        iteration = Sequence(mean(goal, arrive), self.average_estimates())
        if self.local_steps > 1:
            iteration = Sequence(Repeat(Local(step), self.local_steps - 1, name="local steps"), iteration)
        return self.iterate(iteration, enter, average_fields("hyper"), Local(begin), self.average_estimates())
