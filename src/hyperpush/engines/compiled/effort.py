"""Estimate the work of a run from its structure, to choose compiler optimizations and whether to use a single call."""

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

STARTED = 100_000  # operations computed in the time that it takes to start a function or an exchange, about 0.5 µs
# Programs with less work per equation are compiled at level "quick" or "light". An equation takes about a millisecond
# longer to compile at level "full" than at "quick", but a quick program computes about a tenth as fast
# (docs/results/benchmarks.md).
QUICK = 150_000
LIGHT = 800_000
ONCE = 4_000_000_000  # operations that take 0.15 s in a quick program
# A run with fewer operations is a single compiled call if no hook observes it. It takes up to about a second.
WHOLE = 100_000_000_000
# Clients with more bytes than this are computed one after another. It is about the size of one core's cache: computing
# all clients at once saves no time if their arrays exceed the cache (docs/results/benchmarks.md).
HEAVY = 1 << 20


def clients_at_a_time(found: Profile, data: PyTree) -> int | None:
    """Return the number of clients to compute at a time: 1 if clients are large, else None for all at once.

    A client is large if its state and the largest array that it computes take more than `HEAVY` bytes. They must also
    take more than the client's data, which each turn copies.
    """
    heavy = found.heaviest
    return 1 if heavy > max(HEAVY, bytes_of(one_client(data))) else None


class Choice(NamedTuple):
    """Function that chooses the level of compiler optimizations for a run with `size` operations."""

    size: int

    def __call__(self, jaxpr: Jaxpr) -> Level:
        work = self.size / max(equations(jaxpr), 1)
        return "quick" if work < QUICK else "light" if work < LIGHT else "full"


def level_of_one_run(jaxpr: Jaxpr) -> Level:
    """Return the level of compiler optimizations for a program that runs once, such as a check of a task."""
    return "quick" if operations(jaxpr) < ONCE else "full"


def effort(found: Profile, network: Network, tree: Tree | None = None) -> int:
    """Return the number of operations of one run for all clients.

    Loops that clients agree to end count as at most 30 iterations. An average along the `tree` also counts the rounds
    in which it is expected to wait for links.
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
    """Return the number of entries in the arrays that hold the links of all clients."""
    leaves, structure = jax.tree.flatten(network)
    kinds = [(leaf.shape, leaf.dtype) if hasattr(leaf, "shape") else leaf for leaf in leaves]
    return _links_of(structure, tuple(kinds))


@lru_cache(maxsize=256)
def _links_of(structure: Any, kinds: tuple[Any, ...]) -> int:
    arrays = [jax.ShapeDtypeStruct(*kind) if isinstance(kind, tuple) else kind for kind in kinds]
    network = structure.unflatten(arrays)
    one = jax.eval_shape(lambda net: net.links(jax.random.key(0), 0, jnp.arange(1), "ones"), network)
    return network.clients * one.alive.size
