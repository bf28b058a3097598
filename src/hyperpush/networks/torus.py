"""A torus: a grid whose opposite borders meet."""

import math
from typing import ClassVar

import equinox as eqx
import networkx as nx

from hyperpush.base.checks import check_integer
from hyperpush.base.errors import InvalidInput
from hyperpush.networks.table import FixedGraph


class Torus(FixedGraph):
    """A grid of rows × columns whose opposite borders meet: client r · columns + c talks to its four neighbors.

    **Use it** as a sparse network that mixes better than a ring: averages need about n rounds, not n². **Avoid it**
    if the number of clients is prime, because no grid exists.

    Args:
        clients: n, at least 4.
        rows: A divisor of n; None takes the most square grid. 1 is a ring.
        mixing: Gossip weights: `"metropolis"`, or `"fastest-mixing"` for up to 200 clients.

    Raises:
        InvalidInput: An option is out of range; the message names it.

    Example:
        >>> import hyperpush as hp
        >>> print(hp.networks.Torus(12).rows, hp.networks.Torus(12).flood_rounds())
        3 3
    """

    name: ClassVar[str] = "torus"

    rows: int = eqx.field(static=True)

    def __init__(self, clients: int, rows: int | None = None, mixing: str = "metropolis"):
        clients = check_integer("clients", clients, minimum=4)
        self.rows = _squarest(clients) if rows is None else check_integer("rows", rows, minimum=1)
        if clients % self.rows:
            raise InvalidInput("rows", rows, f"a divisor of the number of clients, {clients}")
        if rows is None and self.rows == 1:
            raise InvalidInput("clients", clients, "a number with a divisor, or rows = 1 for a single row (a ring)")
        super().__init__("clients", nx.grid_2d_graph(self.rows, clients // self.rows, periodic=True), mixing)


def _squarest(clients: int) -> int:
    return next(rows for rows in range(math.isqrt(clients), 0, -1) if clients % rows == 0)
