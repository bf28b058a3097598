"""Estimate the work of a run from its structure alone, to select the compile level and compilation in one piece."""

from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from hyperpush.engines.compiled.compile import Level
from hyperpush.networks import Network
from hyperpush.programs import Path, Profile, bytes_of, one_client
from hyperpush.programs.operations import DRAWN, OPEN_ENDED, operations

STARTED = 100_000  # operations in the time to start one leaf or one exchange, about 0.5 µs
# Runs with fewer operations are compiled at level "quick" or "light". An operation takes about 5 ps on one of two
# cores, so these limits are 1.5 and 20 ms (docs/results/benchmarks.md).
QUICK = 300_000_000
LIGHT = 4_000_000_000
# A run with fewer operations is compiled in one piece if it is not watched: it takes up to about a second.
WHOLE = 100_000_000_000
# Clients with more bytes than this are computed in turn: about what the cache of one core holds. Larger arrays leave
# the cache when all clients are computed at once, so that saves no time (docs/results/benchmarks.md).
HEAVY = 1 << 20


def clients_at_a_time(found: Profile, data: PyTree) -> int | None:
    """Return 1 if a client's state and the largest array that it computes are large, else None: all at once.

    Large is more than `HEAVY`, and more than the client's data, which each turn copies.
    """
    heavy = found.heaviest
    return 1 if heavy > max(HEAVY, bytes_of(one_client(data))) else None


def level_of(size: int) -> Level:
    """Return the compile level of a run with `size` operations."""
    return "quick" if size < QUICK else "light" if size < LIGHT else "full"


def level_of_one_run(jaxpr: Any) -> Level:
    """Return the compile level of a program that runs once: a check, or the costs at the end of a study.

    Quick compiling saves about 0.3 s, and below this limit it costs at most 0.15 s of the run.
    """
    return "quick" if operations(jaxpr) < LIGHT else "full"


def effort(found: Profile, network: Network) -> int:
    """Return the operations of one run for all clients. Loops that clients end count as at most 30 passes."""
    passes: dict[Path, int] = {(): 1}
    for body, around, loop in found.loops:
        passes[body] = passes[around] * (min(loop.at_most, OPEN_ENDED) if loop.agreed else loop.at_most)
    leaves = [passes[body] * (STARTED * count + network.clients * done) for body, (count, done) in found.effort.items()]
    links, drawn = links_of(network), DRAWN if network.varying else 0
    rounds = [
        passes[body] * count * (STARTED + links * (width + drawn))
        for (body, count), width in zip(found.rounds, found.width.values(), strict=True)
    ]
    return sum(leaves) + sum(rounds)


def links_of(network: Network) -> int:
    """Return the size of the arrays that hold the links of all clients."""
    leaves, structure = jax.tree.flatten(network)
    kinds = [(leaf.shape, leaf.dtype) if hasattr(leaf, "shape") else leaf for leaf in leaves]
    return _links_of(structure, tuple(kinds))


@lru_cache(maxsize=256)
def _links_of(structure: Any, kinds: tuple[Any, ...]) -> int:
    arrays = [jax.ShapeDtypeStruct(*kind) if isinstance(kind, tuple) else kind for kind in kinds]
    network = structure.unflatten(arrays)
    one = jax.eval_shape(lambda net: net.links(jax.random.key(0), 0, jnp.arange(1), "ones"), network)
    return network.clients * one.alive.size
