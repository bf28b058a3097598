"""Estimate the work of a run from its structure alone, to select the compile level and compilation in one piece."""

from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr
from jaxtyping import PyTree

from hyperpush.engines.compiled.compile import Level
from hyperpush.networks import Network
from hyperpush.networks.trees import Tree, WaitingTree
from hyperpush.programs import Path, Profile, bytes_of, one_client
from hyperpush.programs.operations import DRAWN, OPEN_ENDED, equations, operations

STARTED = 100_000  # operations in the time to start one leaf or one exchange, about 0.5 µs
# Programs with less work per equation are compiled at level "quick" or "light". An equation takes about a millisecond
# more to compile fully than quickly, and a quick program computes about a tenth as fast (docs/results/benchmarks.md).
QUICK = 150_000
LIGHT = 800_000
ONCE = 4_000_000_000  # operations that take 0.15 s in a quick program
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


class Choice(NamedTuple):
    """The choice of a compile level for a run with `size` operations: it spends effort where there is work."""

    size: int

    def __call__(self, jaxpr: Jaxpr) -> Level:
        work = self.size / max(equations(jaxpr), 1)
        return "quick" if work < QUICK else "light" if work < LIGHT else "full"


def level_of_one_run(jaxpr: Jaxpr) -> Level:
    """Return the compile level of a program that runs once: a check, or the costs at the end of a study."""
    return "quick" if operations(jaxpr) < ONCE else "full"


def effort(found: Profile, network: Network, tree: Tree | None = None) -> int:
    """Return the operations of one run for all clients. Loops that clients end count as at most 30 passes.

    An average along the `tree` counts the rounds in which it is expected to wait for links.
    """
    passes: dict[Path, int] = {(): 1}
    for body, around, loop in found.loops:
        passes[body] = passes[around] * (min(loop.at_most, OPEN_ENDED) if loop.agreed else loop.at_most)
    leaves = [passes[body] * (STARTED * count + network.clients * done) for body, (count, done) in found.effort.items()]
    links, drawn = links_of(network), DRAWN if network.varying else 0
    waits = tree.planned_rounds if isinstance(tree, WaitingTree) else 1
    rounds = [
        passes[body] * count * ((waits if path in found.by_tree else 1) * (STARTED + links * drawn) + links * width)
        for (body, count), (path, width) in zip(found.rounds, found.width.items(), strict=True)
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
