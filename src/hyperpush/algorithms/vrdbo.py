"""VRDBO: MDBO with corrected estimates, which have a lower variance."""

from collections.abc import Callable
from typing import Any, ClassVar

from jaxtyping import PyTree

from hyperpush.algorithms.inverse import Point, correct
from hyperpush.algorithms.mdbo import MDBO


class VRDBO(MDBO):
    """MDBO with corrected estimates, which have a lower variance than its moving averages.

    The estimates a and b of `MDBO` are corrected instead of averaged. Derivatives at the old and the new point use the
    same batch (Gao, Gu and Thai, arXiv:2206.15025):

        a⁺ = h_i(x⁺, y⁺) + (1 − α₁η²)(a − h_i(x, y))
        b⁺ = ∂_y g_i(x⁺, y⁺) + (1 − α₂η²)(b − ∂_y g_i(x, y))

    All other steps, and the fixed point x_M, are those of `MDBO`.

    **Use it** instead of `MDBO` with small batches. **Avoid it** with all examples, where it only adds work.

    Departures from the paper:

    1. `inverse` is conjugate gradients on all examples by default. The paper takes a `Neumann` series.

    Args:
        steps: Iterations, one round of gossip each. With 0 all values stay as they are.
        outer_step_size: β₁, above 0; a number or a schedule by iteration. Start well below β₂.
        inner_step_size: β₂, above 0; a number or a schedule by iteration. Constant steps need β₂ < 2/λ_max(H_i).
        step_scale: η, above 0; a number or a schedule by iteration. 1 takes full steps.
        outer_momentum: α₁, above 0 with α₁η² ≤ 1. α₁η² = 1 keeps no old estimate.
        inner_momentum: α₂, above 0 with α₂η² ≤ 1. α₂η² = 1 keeps no old estimate.
        inverse: Method that applies H_i⁻¹: `ConjugateGradients(steps)` or `Neumann(terms, step_size)`.
        batch_size: Examples per estimate, drawn anew each time; None uses all. A number needs `inverse=Neumann(…)`.

    Raises:
        InvalidInput: An option is out of range; the message names it and what is allowed.

    Example:
        >>> import hyperpush as hp
        >>> from hyperpush.tasks.quadratic import outer_fixed_points
        >>> task = hp.tasks.quadratic(4, seed=0, common=True)
        >>> method = hp.algorithms.VRDBO(steps=500, outer_step_size=0.05, inner_step_size=0.1, step_scale=0.7)
        >>> found = hp.solve(task, method, hp.networks.Ring(4), key=0)
        >>> bool(abs(found.hypers - outer_fixed_points(task.train, task.validation)["x_M"]).max() < 1e-3)
        True
    """

    power: ClassVar[int] = 2

    def renew(
        self, estimate: Callable[[Point], PyTree], kept: PyTree, new: Point, old: Point, shares: tuple[Any, Any]
    ) -> tuple[PyTree, PyTree]:
        return correct(estimate, kept, new, old, shares)
