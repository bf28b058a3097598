"""What a bilevel run leaves behind of every outer step."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Array, Float, Int, PyTree

from hyperpush.program import Node, Repeat, Survey, contains


@dataclass(frozen=True)
class History:
    """By outer step: row t is after t of them, so there is one row more than steps; clients on axis 1."""

    outer_costs: Float[Array, "points clients"]  # each client's F_i(x*(λ), λ_i)
    metrics: Float[Array, "points clients"] | None  # each client's own metric, with early stopping
    mean_metric: Float[Array, " points"] | None  # the mean that they agreed on
    norms: Float[Array, "steps clients"]  # ‖hyper-gradient‖ that the step followed
    hypers: PyTree  # [points, clients, …]; None if not traced
    hypergradients: PyTree  # [steps, clients, …]; None if not traced, or without any
    rounds: Int[np.ndarray, " points"] | None  # rounds of communication so far; None if they vary from step to step
    floats: Int[np.ndarray, " points"] | None  # numbers each client sent so far


def spent(start: Survey, step: Node, total: tuple[int, int], steps: int) -> np.ndarray | None:
    """(rounds, floats) after the program's start and after each of `steps` equal steps, [steps + 1, 2].

    `total` is what all of it took. None if a loop inside ends by agreement: then steps are not equal.
    """
    if any(loop.agreed for _, _, loop in start.loops) or contains(step, lambda n: isinstance(n, Repeat) and n.agreed):
        return None
    passes = start.passes({})
    first = np.array([sum(passes[s.body] * s.messages(1) for s in start.sendings), start.floats({}, 1)])
    return first + np.arange(steps + 1)[:, None] * ((np.asarray(total) - first) // max(steps, 1))
