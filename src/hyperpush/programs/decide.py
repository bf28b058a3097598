"""End a loop on exact averages by the decision of one client.

An average along a tree is equal to the last bit at every client. But values computed from the average may differ by
rounding, because processors and compilers differ. Then a client could stop a step earlier and leave the others waiting.
"""

from collections.abc import Callable
from dataclasses import replace

from jaxtyping import Array, Bool

from hyperpush.programs.nodes import Average, Context, State, has_ended

__all__ = ["decide_at_root", "has_ended"]


def decide_at_root(average: Average, until: Callable[[State, Context], Bool[Array, ""]]) -> Average:
    """Return the exact average, which also sets `state.ended` of every client to the root's result of `until`."""
    return replace(average, ends=until)
