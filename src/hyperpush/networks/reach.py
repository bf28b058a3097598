"""Check that networks are connected, and compute the rounds in which a flood reaches all clients."""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse
from jaxtyping import Array, Int
from scipy.sparse.csgraph import breadth_first_order, connected_components, shortest_path

from hyperpush.base.errors import InvalidInput
from hyperpush.networks.base import Network
from hyperpush.networks.mixing import combine

_EXACT = 2048
_FLOODS = 8
_SOURCES = 64
_LONGEST = 100_000
_FAILURE = 1e-9


def require_connected(field: str, possible: scipy.sparse.csr_array) -> None:
    """Raise InvalidInput unless the union of links over all steps is strongly connected; name unreached clients."""
    if is_connected(possible):
        return
    for links, trouble in ((possible, "be reached from client 0"), (possible.T.tocsr(), "reach client 0")):
        reached = breadth_first_order(links, 0, return_predecessors=False)
        left_out = np.setdiff1d(np.arange(len(possible.indptr) - 1), reached)
        if left_out.size:
            more = f" and {left_out.size - 10} more" if left_out.size > 10 else ""
            given = f"a network where clients {', '.join(map(str, left_out[:10]))}{more} cannot {trouble}"
            raise InvalidInput(field, given, "links that join all clients over time")


def is_connected(possible: scipy.sparse.csr_array) -> bool:
    """Return True if all clients can reach each other."""
    return connected_components(possible, connection="strong", return_labels=False) == 1


def periodic_flood(frames: Sequence[scipy.sparse.csr_array]) -> int:
    """Return the rounds in which any flood reaches all clients, with links `frames[t % len(frames)]` at step t.

    A flood follows shortest paths in the graph unfolded in time, with nodes (phase, client). Up to 2,048 nodes the
    longest of them is computed exactly. Beyond, the length of a path through client 0 at phase 0 is an upper bound.
    """
    period, clients = len(frames), len(frames[0].indptr) - 1
    waiting = scipy.sparse.eye_array(clients, dtype=bool, format="csr")
    blocks: list[list[scipy.sparse.csr_array | None]] = [[None] * period for _ in range(period)]
    for phase, frame in enumerate(frames):
        blocks[phase][(phase + 1) % period] = waiting + frame
    unfolded = scipy.sparse.csr_array(scipy.sparse.block_array(blocks))
    if period * clients <= _EXACT:
        return int(_rounds(unfolded, None, clients).max())
    arriving = shortest_path(unfolded.T.tocsr(), unweighted=True, indices=[0])
    return int(arriving.max() + _rounds(unfolded, [0], clients).max())


def _rounds(unfolded: scipy.sparse.csr_array, starts: list[int] | None, clients: int) -> np.ndarray:
    """Return the rounds from each start (phase, client) until each client is reached, at whatever phase."""
    distances = shortest_path(unfolded, unweighted=True, indices=starts)
    return distances.reshape(distances.shape[0], -1, clients).min(axis=1)


def random_flood(network: Network, stall: float) -> int:
    """Return the rounds in which a flood over random links reaches all clients, except with probability about 1e-9.

    The typical number of rounds is the longest of 8 simulated floods from up to 64 clients, with fixed keys. After it,
    a flood stalls for a round only if no live link leads from an informed to an uninformed client. If every pair can be
    linked, this is most probable if one client is informed or one is not: `stall` is that probability. The margin of m
    rounds satisfies n² stall^m ≤ 1e-9 for the n² pairs (start, end). The estimate assumes that stalls add up.
    """
    if network.clients == 1:
        return 0
    sources = jnp.asarray(np.linspace(0, network.clients - 1, min(network.clients, _SOURCES)).astype(np.int32))
    typical = max(int(_simulated_flood(network, sources, flood)) for flood in range(_FLOODS))
    if typical >= _LONGEST:
        allowed = f"links so probable that a flood reaches all clients within {_LONGEST} rounds"
        raise InvalidInput("probability", network, allowed)
    margin = math.log(network.clients**2 / _FAILURE) / -math.log(stall) if stall > 0 else 0
    return typical + math.ceil(margin)


@jax.jit
def _simulated_flood(network: Network, sources: Int[Array, " s"], flood: Int[Array, ""]) -> Int[Array, ""]:
    clients = jnp.arange(network.clients)
    key = jax.random.fold_in(jax.random.key(0), flood)

    def spread(state):
        knows, step = state
        links = network.links(key, step, clients, "ones")
        return knows | (combine(links, knows.astype(jnp.float32), network.clients) > 0), step + 1

    def unfinished(state):
        knows, step = state
        return (step < _LONGEST) & ~knows.all()

    return jax.lax.while_loop(unfinished, spread, (clients[:, None] == sources, jnp.int32(0)))[1]
