"""VRDBO: MDBO with estimates of lower variance."""

from typing import Any, ClassVar

from jaxtyping import PyTree

from hyperpush.algorithms.mdbo import INFO, TrackedMomentum
from hyperpush.algorithms.storm import at_both, recursive
from hyperpush.method import MethodInfo


class VRDBO(TrackedMomentum):
    """MDBO with estimates of lower variance.

    The estimates are corrected instead of averaged, both points on the same batch (Gao, Gu and Thai,
    arXiv:2206.15025):

        a⁺ = h_i(x⁺, y⁺) + (1 − α₁η²)(a − h_i(x, y)),   b⁺ alike with ∂_y g_i and α₂

    All else is that of `MDBO`, its fixed point x_M included.

    **Use it** instead of `MDBO` with small batches. **Avoid it** with all examples, where it only adds work.

    Departures from the paper:

    1. `inverse` is conjugate gradients on all examples by default. The paper takes a `Neumann` series.

    Args:
        steps: Iterations, one round of gossip each.
        outer_step_size: β₁, above 0; a number or a schedule by iteration.
        inner_step_size: β₂, above 0; a number or a schedule by iteration.
        step_scale: η, above 0; a number or a schedule by iteration. 1 moves all the way.
        outer_momentum: α₁, above 0 with α₁η² ≤ 1. α₁η² = 1 forgets all before.
        inner_momentum: α₂, above 0 with α₂η² ≤ 1. α₂η² = 1 forgets all before.
        inverse: How H_i⁻¹ is applied: `ConjugateGradients(steps)` or `Neumann(terms, step_size)`.
        batch_size: Examples per estimate, drawn anew each time; None uses all. Numbers need `inverse=Neumann(…)`.

    Raises:
        InvalidInput: An option is out of range; the message names it and what is allowed.
    """

    info: ClassVar[MethodInfo] = INFO
    power: ClassVar[int] = 2

    def renewed(self, kept: Any, forget: tuple[Any, Any], estimate: Any, new: Any, old: Any) -> tuple[PyTree, PyTree]:
        above, below = map(recursive, kept, *at_both(estimate, new, old), forget)
        return above, below
