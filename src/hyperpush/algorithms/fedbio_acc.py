"""FedBiOAcc: FedBiO with corrected estimates instead of new ones."""

from dataclasses import replace
from typing import ClassVar

import equinox as eqx
from jaxtyping import PyTree

from hyperpush.algorithms.fedbio import FedBiO, LocalState
from hyperpush.algorithms.inverse import Point, correct
from hyperpush.algorithms.pooled import mean
from hyperpush.base.numbers import as_number
from hyperpush.base.schedules import Share, step_size_at
from hyperpush.methods.base import MethodInfo
from hyperpush.programs import Context, Node
from hyperpush.task.problem import Problem


class FedBiOAcc(FedBiO):
    """FedBiO with momentum-based variance reduction on both levels.

    Each client keeps estimates ν of its own hypergradient h_i and ω of ∂_y g_i, with h_i and g_i as in `FedBiO`. They
    are corrected instead of computed anew (Li, Huang and Huang, arXiv:2205.01608). A local step is, with derivatives at
    the old point (x, y) and the new point (x⁺, y⁺) on the same batch,

        x⁺ = x − αν,   y⁺ = y − βω
        ν⁺ = h_i(x⁺, y⁺) + (1 − c)(ν − h_i(x, y))
        ω⁺ = ∂_y g_i(x⁺, y⁺) + (1 − c)(ω − ∂_y g_i(x, y))

    After `local_steps` such steps, x_i and ν_i become the means over all clients.

    **Use it** instead of `FedBiO` with mini-batches. **Avoid it** with all examples, where it only adds work.

    Departures from the paper:

    1. `inverse` is conjugate gradients on all examples by default. The paper takes a `Neumann` series.

    Args:
        steps: Rounds with the server. With 0 hypers and estimates are averaged once.
        outer_step_size: α, above 0; a number or a schedule by local steps taken. Start well below β.
        inner_step_size: β, above 0; a number or a schedule by local steps taken. Constant steps need β < 2/λ_max(H_i).
        local_steps: Steps between two averages, at least 1.
        inverse: Method that applies H_i⁻¹: `ConjugateGradients(steps)` or `Neumann(terms, step_size)`.
        batch_size: Examples per estimate, drawn anew each time; None uses all. A number needs `inverse=Neumann(…)`.
        forget: c, above 0 and at most 1; a number or a schedule by local steps taken. 1 keeps no old estimate, as in
            `FedBiO`. The paper lets c fall like α².

    Raises:
        InvalidInput: An option is out of range; the message names it and what is allowed.

    Example:
        >>> import hyperpush as hp
        >>> from hyperpush.tasks.quadratic import outer_fixed_points
        >>> task = hp.tasks.quadratic(4, seed=0, common=True)
        >>> method = hp.algorithms.FedBiOAcc(steps=200, outer_step_size=0.1, inner_step_size=0.2, forget=0.5)
        >>> found = hp.solve(task, method, hp.networks.FullyConnected(4), key=0)
        >>> bool(abs(found.hypers - outer_fixed_points(task.train, task.validation)["x_L"]).max() < 1e-3)
        True
    """

    info: ClassVar[MethodInfo] = replace(
        FedBiO.info, sends="hypers and their hypergradient", example={**FedBiO.info.example, "forget": 0.5}
    )

    forget: Share = eqx.field(converter=as_number, kw_only=True)

    def renew(self, problem: Problem, state: LocalState, new: Point, ctx: Context) -> tuple[PyTree, PyTree]:
        def estimate(point: Point) -> tuple[PyTree, PyTree]:
            return self.own_gradients(problem, point, ctx)

        old, forget = (state.params, state.hyper), step_size_at(self.forget, state.step)
        return correct(estimate, state.estimates, new, old, forget)

    def average_estimates(self) -> Node:
        return mean(
            lambda state, ctx: state.estimates[0],
            lambda state, average, ctx: replace(state, estimates=(average, state.estimates[1])),
        )
