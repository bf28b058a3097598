"""TTSA: alternating inner and outer steps with exact averages, at two time scales."""

from dataclasses import replace
from typing import ClassVar

import optax

from hyperpush.algorithms.base import BilevelState
from hyperpush.algorithms.bsa import BSA
from hyperpush.algorithms.pooled import PooledDescent, PooledState, average_fields
from hyperpush.methods.base import MethodInfo
from hyperpush.programs import Context, Node, Sequence
from hyperpush.task.problem import Problem


class TTSA(PooledDescent):
    """Two-timescale stochastic approximation: one inner step, then one outer step at the new params.

    All clients share the params y and the hypers x. With the mean inner cost g, the mean outer cost F,
    H = ∂²_yy g and J = ∂²_xy g (Hong et al., arXiv:2007.05170):

        y ← y − β_k ∂_y g(x, y)
        x ← x − α_k (∂_xF − J H⁻¹ ∂_yF)(x, y)

    **Use it** with mini-batches and falling step sizes; the paper lets α_k fall like k^−3/5 and β_k like k^−2/5.
    **Avoid it** where a server is too expensive: every iteration takes exact averages.

    Departures from the paper:

    1. `inverse` is conjugate gradients on all examples by default. The paper draws a random `Neumann`.
    2. The hypers are not projected to a set.

    Args:
        steps: Iterations. With 0 every client gets the mean of the initial values.
        outer_step_size: α, above 0; a number or a schedule by iteration. It should fall faster than β.
        inner_step_size: β, above 0; a number or a schedule by iteration. Constant steps need β < 2/λ_max(H).
        inverse: Method that applies H⁻¹: `ConjugateGradients(steps)` or `Neumann(terms, step_size)`.
        batch_size: Examples per estimate, drawn anew each time; None uses all. A number needs `inverse=Neumann(…)`.

    Raises:
        InvalidInput: An option is out of range; the message names it and what is allowed.

    Example:
        >>> import hyperpush as hp
        >>> from hyperpush.tasks.quadratic import outer_fixed_points
        >>> task = hp.tasks.quadratic(4, seed=0, common=True)
        >>> method = hp.algorithms.TTSA(steps=200, outer_step_size=0.2, inner_step_size=0.3)
        >>> found = hp.solve(task, method, hp.networks.FullyConnected(4), key=0)
        >>> bool(abs(found.hypers - outer_fixed_points(task.train, task.validation)["x_G"]).max() < 1e-3)
        True
    """

    info: ClassVar[MethodInfo] = replace(
        BSA.info,
        paper="Hong et al., A two-timescale stochastic algorithm framework for bilevel optimization, arXiv:2007.05170",
        example={"steps": 3, "outer_step_size": 0.05, "inner_step_size": 0.1},
    )

    def program(self, problem: Problem) -> Node:
        def enter(state: BilevelState, ctx: Context) -> PooledState:
            return PooledState(state.params, state.hyper, optax.tree.zeros_like(state.hyper))

        iteration = Sequence(self.descend_inner(problem), self.hypergradient(problem), self.descend_outer())
        return self.iterate(iteration, enter, average_fields("params", "hyper"))
