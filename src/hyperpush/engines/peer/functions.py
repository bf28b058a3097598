"""One client's jitted functions and its links at one step. Peers in one process share compiled code."""

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, final

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PRNGKeyArray, PyTree

from hyperpush.engines import keys
from hyperpush.engines.compiled.placement import alive_rows, weight_rows
from hyperpush.engines.peer.state import PeerCursor
from hyperpush.engines.result import RecordFunction
from hyperpush.networks import Network, Weights, lowest
from hyperpush.programs import Context, ProgramRecipe, Role, at, leaf_key, leaf_of, stepwise

turns = threading.RLock()
"""Held while a peer traces, compiles or computes, so that the peers of one process take turns.

XLA runs all computations of a process in one pool, with a thread per core. LAPACK's kernels for stacked matrices occupy
a thread of this pool while they wait for parts that they queue in the same pool. If as many such kernels run at once
as there are cores, they wait forever. Taking turns also compiles each function once instead of once per peer.
"""


def in_turn(compute: Callable[[], Any]) -> Any:
    """Run `compute()` to its end while no other peer of this process computes, and return its result."""
    with turns:
        return jax.block_until_ready(compute())


@eqx.filter_jit
def _leaf(recipe, path, record, role, args, client, clients, round, root, draws, address, data):
    f = leaf_of(at(stepwise(recipe.program()), path), role) if record is None else record
    own = leaf_key(_key_at(draws, address), role, client)
    return f(*args, Context(client, clients, round, own, data, leaf_key(_key_at(root, address), role, clients)))


@eqx.filter_jit
def compute_key(root, address):
    """Return the key for a server's computation."""
    return leaf_key(_key_at(root, address), Role.COMPUTE, 0)


def _key_at(root, address):
    key = keys.program_key(root)
    for place in range(address.shape[0]):
        key = jax.random.fold_in(key, address[place])
    return key


@eqx.filter_jit
def _schedule(network, root, step, client, weights):
    everyone = network.links(keys.network_key(root), step, jnp.arange(network.clients), weights)
    rows, alive = weight_rows(everyone, network.clients), alive_rows(everyone, network.clients)
    return everyone.own[client], rows[client], alive[client], alive[:, client], rows[:, client]


class ClientLinks(NamedTuple):
    """The links of one client at one step, as masks and weights over all clients."""

    own: np.ndarray  # the share that the client keeps
    weights: np.ndarray  # weights of its messages, by receiver
    to: np.ndarray  # True for clients that get its messages
    heard: np.ndarray  # True for clients whose messages it gets
    given: np.ndarray  # weights of messages to this client, by sender

    def without(self, out: list[int]) -> "ClientLinks":
        """Return the links without the peers in `out`; this client keeps their shares."""
        own = np.asarray(self.own + self.weights[out].sum(dtype=self.weights.dtype))
        weights, to, heard, given = (each.copy() for each in (self.weights, self.to, self.heard, self.given))
        weights[out], to[out], heard[out], given[out] = 0, False, False, 0
        return ClientLinks(own, weights, to, heard, given)

    def keep_shares(self, late: list[int]) -> "ClientLinks":
        """Return the links with weight 0 for links that are down and for peers in `late`, whose shares are kept."""
        weights = np.where(self.to, self.weights, 0)
        own = np.asarray(self.own + weights[late].sum(dtype=weights.dtype))
        weights[late] = 0
        return self._replace(own=own, weights=weights)


def links_at(network: Network, key: PRNGKeyArray, step: int, client: int, weights: Weights) -> ClientLinks:
    """Return the links of one client at one step of network time."""
    at, me = np.asarray(step, np.int32), np.asarray(client, np.int32)
    found = in_turn(lambda: _schedule(network, key, at, me, weights))
    return ClientLinks(*(np.asarray(part) for part in found))


@final
class ClientFunctions:
    """The functions of a program for one client, called with its number, data and keys."""

    def __init__(self, recipe: ProgramRecipe, client: int, clients: int, key: PRNGKeyArray, data: PyTree):
        self.client, self.clients, self.key, self.data = client, clients, key, data
        self.draws = key  # key of the client's own draws
        self._recipe = recipe.traceable()

    def apply(self, at: PeerCursor, role: Role, *args: PyTree, record: RecordFunction | None = None) -> Any:
        """Call `f(*args, context)`, where `f` is the function of `role` at a node, or `record` if given."""
        address = np.asarray(at.address, np.uint32)
        me, round = np.asarray(self.client, np.int32), np.asarray(at.round, np.int32)
        given = (args, me, self.clients, round, self.key, self.draws, address, self.data)
        return in_turn(lambda: _leaf(self._recipe, at.path, record, role, *given))


def combine(like: PyTree, arrived: list[tuple[int, PyTree, float]], reduce: str, clients: int) -> PyTree:
    """Return the weighted sum, maximum or stack of the messages that have arrived."""

    def total(leaf, *others):
        if reduce == "max":
            return jnp.asarray(np.max([np.full_like(leaf, lowest(leaf.dtype)), *others], axis=0))
        if reduce == "stack":
            rows = np.zeros((clients, *np.shape(leaf)), np.asarray(leaf).dtype)
            for (sender, _, _), other in zip(arrived, others, strict=True):
                rows[sender] = other
            return jnp.asarray(rows)
        wide = np.zeros(leaf.shape, np.float64)
        for (_, _, weight), other in zip(arrived, others, strict=True):
            wide += weight * np.asarray(other, np.float64)
        return jnp.asarray(wide, leaf.dtype if jnp.issubdtype(leaf.dtype, jnp.inexact) else jnp.result_type(float))

    return jax.tree.map(total, like, *(value for _, value, _ in arrived))


def row(leaf: Any, client: int) -> Any:
    """Return one client's part of a stacked array. NumPy does this without compilation, except for random keys."""
    return leaf[client] if is_key(leaf) else jnp.asarray(np.asarray(leaf)[client])


def stack(trees: Sequence[PyTree], axis: int = 0) -> PyTree:
    """Stack trees leaf by leaf. NumPy does this without compilation, except for random keys."""

    def one(*rows: Any) -> Any:
        return jnp.stack(rows, axis) if is_key(rows[0]) else jnp.asarray(np.stack(rows, axis))

    return jax.tree.map(one, *trees)


def is_key(leaf: Any) -> bool:
    """Return True if an array holds random keys."""
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
