"""A problem together with where to start and on what data: what an experiment runs on."""

from collections.abc import Callable
from typing import NamedTuple

from jaxtyping import PyTree

from hyperpush.problem import Problem


class Instance(NamedTuple):
    """A problem, a starting point and data, clients on axis 0 of every array."""

    problem: Problem
    params: PyTree
    hypers: PyTree
    inner_data: PyTree
    outer_data: PyTree


Maker = Callable[[int, int], Instance]  # (clients, seed) -> instance
