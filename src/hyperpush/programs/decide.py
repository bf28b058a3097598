"""The end of a loop that looks at exact averages, decided by one client for all.

An average along a tree is the same to the last bit everywhere. What clients compute from it may differ by rounding:
their processors and compilers need not be alike. Who stopped a step earlier would leave the others waiting.
"""

from collections.abc import Callable
from dataclasses import replace

from jaxtyping import Array, Bool

from hyperpush.programs.nodes import Average, Context, State, has_ended

__all__ = ["decide_at_root", "has_ended"]


def decide_at_root(average: Average, until: Callable[[State, Context], Bool[Array, ""]], stays: bool = True) -> Average:
    """The same exact average, which also brings what the root thinks of the end: `state.ended`, for all alike."""
    return replace(average, ends=until)
