"""Networks whose links were recorded or follow a schedule."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import equinox as eqx
import numpy as np
from jaxtyping import Bool

from hyperpush.base.checks import check_integer
from hyperpush.base.errors import InvalidInput
from hyperpush.networks.table import LinkTable, Listed, adjacency


class Trace(Listed):
    """The links of T steps, repeated: step t has those of step t mod T.

    A single step may be disconnected if the links of all steps together connect the clients. So any
    B-strongly-connected schedule is allowed. If all links of every step run both ways, the trace is undirected and has
    Metropolis weights for gossip. **Use it** to replay a recording, or for your own schedule. **Avoid it** for long
    recordings of many clients: memory grows with T·n².

    Args:
        clients: n, at least 2.
        steps: An array bool[T, n, n] that is true at [t, j, i] if j sends to i in step t. Or a list that has, for each
            step, the list of its pairs (j, i).

    Raises:
        InvalidInput: The steps have a wrong shape, or never connect all clients; the message names the step or clients.

    Example:
        >>> import hyperpush as hp
        >>> network = hp.networks.Trace(3, [[(0, 1)], [(1, 2), (2, 0)]])
        >>> print(network.directed, network.varying, network.flood_rounds())
        True True 4
    """

    example: ClassVar[Mapping[str, Any]] = {"steps": [[[0, 1], [1, 2], [3, 4]], [], [[2, 3], [4, 5], [5, 0]]]}
    name: ClassVar[str] = "trace"

    directed: bool = eqx.field(static=True)
    varying: bool = eqx.field(static=True)

    def __init__(self, clients: int, steps: Bool[np.ndarray, "t n n"] | Sequence):
        self.clients = check_integer("clients", clients, minimum=2)
        recorded = isinstance(steps, np.ndarray)
        if not recorded and not (isinstance(steps, Sequence) and all(isinstance(links, Sequence) for links in steps)):
            raise InvalidInput("steps", steps, "a list with the pairs (j, i) of each step")
        if len(steps) == 0 or (recorded and (steps.dtype != bool or steps.shape[1:] != (clients, clients))):
            given = f"an array {steps.dtype}{list(steps.shape)}" if recorded else steps
            allowed = f"an array bool[T, {clients}, {clients}] or a list of lists of pairs (j, i)"
            raise InvalidInput("steps", given, allowed)
        pairs = [np.argwhere(links) if recorded else _pairs(clients, step, links) for step, links in enumerate(steps)]
        self.table = LinkTable("steps", [adjacency(clients, *ends.T) for ends in pairs])
        self.directed = self.table.gossip is None
        self.varying = len(pairs) > 1

    @property
    def steps(self) -> list[list[list[int]]]:
        """The pairs (j, i) of each step."""
        return [np.argwhere(frame.toarray()).tolist() for frame in self.table.frames()]


def _pairs(clients: int, step: int, links: Sequence) -> np.ndarray:
    try:
        ends = np.asarray(links).reshape(len(links), 2)
    except (TypeError, ValueError):
        ends = np.array([[-1.0, -1.0]])
    if links and (ends.dtype.kind not in "iu" or ends.min() < 0 or ends.max() >= clients):
        raise InvalidInput(f"steps[{step}]", links, f"pairs (j, i) of clients from 0 to {clients - 1}")
    return ends.astype(int)
