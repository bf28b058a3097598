"""A grid without borders."""

import math
from typing import ClassVar

import equinox as eqx
import numpy as np

from hyperpush.checks import check_integer
from hyperpush.errors import InvalidInput
from hyperpush.networks.table import Listed, Table, adjacency
from hyperpush.networks.weights import doubly_stochastic


class Torus(Listed):
    """A grid of rows × columns whose opposite borders meet; client r · columns + c talks to its four neighbours.

    Without `rows` the grid is as square as the number of clients allows. `mixing` chooses the gossip weights:
    "metropolis" or "fastest-mixing".
    """

    name: ClassVar[str] = "torus"
    directed: ClassVar[bool] = False
    varying: ClassVar[bool] = False

    clients: int = eqx.field(static=True)
    rows: int = eqx.field(static=True)
    mixing: str = eqx.field(static=True)
    table: Table

    def __init__(self, clients: int, rows: int | None = None, mixing: str = "metropolis"):
        self.clients = check_integer("clients", clients, minimum=4)
        self.rows = _squarest(clients) if rows is None else check_integer("rows", rows, minimum=1)
        if clients % self.rows:
            raise InvalidInput("rows", rows, f"a divisor of the number of clients, {clients}")
        if rows is None and self.rows == 1:
            raise InvalidInput("clients", clients, "a number with a divisor, or rows = 1 for a single row (a ring)")
        self.mixing = mixing
        grid = np.arange(clients).reshape(self.rows, -1)
        shifted = [np.roll(grid, shift, axis) for axis in (0, 1) for shift in (1, -1)]
        graph = adjacency(clients, np.tile(grid.ravel(), 4), np.concatenate([there.ravel() for there in shifted]))
        self.table = Table("clients", [graph], [doubly_stochastic(graph, mixing)])


def _squarest(clients: int) -> int:
    return next(rows for rows in range(math.isqrt(clients), 0, -1) if clients % rows == 0)
