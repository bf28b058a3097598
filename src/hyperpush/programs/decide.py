"""The end of a loop on exact averages, decided by one client for all.

An average along a tree is equal to the last bit at every client. Values computed from it may differ by rounding,
because processors and compilers differ. A client that stopped a step earlier would leave the others waiting.
"""

from collections.abc import Callable
from dataclasses import replace

from jaxtyping import Array, Bool

from hyperpush.programs.nodes import Average, Context, State, has_ended

__all__ = ["decide_at_root", "has_ended"]


def decide_at_root(average: Average, until: Callable[[State, Context], Bool[Array, ""]]) -> Average:
    """Return the exact average with the root's decision on the end of the loop, as `state.ended` of every client."""
    return replace(average, ends=until)
