"""VRDBO: MDBO with estimates of lower variance."""

from typing import Any, ClassVar

from jaxtyping import PyTree

from hyperpush.bilevel.mdbo import DECLARATION, TrackedMomentum
from hyperpush.bilevel.storm import at_both, recursive
from hyperpush.estimators.state import Declaration


class VRDBO(TrackedMomentum):
    """a⁺ = h_i(x⁺, y⁺) + (1 − α₁η²)(a − h_i(x, y)) and b⁺ alike with ∂_y g_i and α₂, both points on the same batch.

    All else is that of `MDBO`. Gao, Gu, Thai 2022.
    """

    declares: ClassVar[Declaration] = DECLARATION
    power: ClassVar[int] = 2

    def renewed(self, kept: Any, forget: tuple[Any, Any], estimate: Any, new: Any, old: Any) -> tuple[PyTree, PyTree]:
        above, below = map(recursive, kept, *at_both(estimate, new, old), forget)
        return above, below
