"""Links as they were recorded, or as a schedule sets them."""

from collections.abc import Sequence
from typing import ClassVar

import equinox as eqx
import numpy as np
import scipy.sparse
from jaxtyping import Bool

from hyperpush.checks import check_integer
from hyperpush.errors import InvalidInput
from hyperpush.networks.table import Listed, Table, adjacency
from hyperpush.networks.weights import metropolis


class Trace(Listed):
    """The links of T steps, repeated: step t has those of step t mod T.

    `steps` is an array [T, n, n] that is true at [t, j, i] where j sends to i, or a list with the pairs (j, i) of each
    step. Each step may be disconnected if all together join the clients: a B-strongly-connected schedule is a trace. If
    every step has its links both ways the trace is undirected, with Metropolis weights for gossip.
    """

    name: ClassVar[str] = "trace"

    clients: int = eqx.field(static=True)
    directed: bool = eqx.field(static=True)
    varying: bool = eqx.field(static=True)
    table: Table

    def __init__(self, clients: int, steps: Bool[np.ndarray, "t n n"] | Sequence):
        self.clients = check_integer("clients", clients, minimum=2)
        recorded = isinstance(steps, np.ndarray)
        if not recorded and not (isinstance(steps, Sequence) and all(isinstance(links, Sequence) for links in steps)):
            raise InvalidInput("steps", steps, "a list with the pairs (j, i) of each step")
        if len(steps) == 0 or (recorded and (steps.dtype != bool or steps.shape[1:] != (clients, clients))):
            given = f"an array {steps.dtype}{list(steps.shape)}" if recorded else steps
            raise InvalidInput(
                "steps", given, f"an array bool[T, {clients}, {clients}] or a list of lists of pairs (j, i)"
            )
        pairs = [np.argwhere(links) if recorded else _pairs(clients, step, links) for step, links in enumerate(steps)]
        frames = [adjacency(clients, ends[:, 0], ends[:, 1]) for ends in pairs]
        self.directed = any(_one_way(frame) for frame in frames)
        self.varying = len(frames) > 1
        self.table = Table("steps", frames, None if self.directed else [metropolis(frame) for frame in frames])


def _pairs(clients: int, step: int, links: Sequence) -> np.ndarray:
    try:
        ends = np.asarray(links).reshape(len(links), 2)
    except (TypeError, ValueError):
        ends = np.array([[-1.0, -1.0]])
    if links and (ends.dtype.kind not in "iu" or ends.min() < 0 or ends.max() >= clients):
        raise InvalidInput(f"steps[{step}]", links, f"pairs (j, i) of clients from 0 to {clients - 1}")
    return ends.astype(int)


def _one_way(frame: scipy.sparse.csr_array) -> bool:
    return (frame != frame.T).nnz > 0
