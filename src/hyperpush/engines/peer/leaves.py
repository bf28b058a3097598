"""One client's leaves, jitted, and its links of a step; what peers of one process compile once for all of them."""

import threading
from collections.abc import Callable
from functools import lru_cache
from typing import Any, final

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PRNGKeyArray, PyTree

from hyperpush.engines import keys
from hyperpush.engines.compiled.placement import alive_rows, weight_rows
from hyperpush.engines.result import RecordFunction
from hyperpush.networks import Network, Weights, lowest
from hyperpush.programs import Context, Path, Recipe, Role, at, leaf_key, leaf_of, stepwise
from hyperpush.programs.recipe import with_kinds

compiling = threading.RLock()  # held by whoever traces or compiles what others will want too


@lru_cache(maxsize=4096)
def _first(what: Any) -> threading.Event:
    """Whether `what` has been compiled."""
    return threading.Event()


def _shared(what: Any, call: Callable[[], Any]) -> Any:
    """`call()`, the first time for `what` by one thread alone: peers of one process wait for it to compile, once."""
    compiled = _first(what)
    if compiled.is_set():
        return call()
    with compiling:
        result = call()
        compiled.set()
        return result


def _kind(tree: PyTree) -> tuple[Any, ...]:
    """What has to be the same for what is compiled to serve again."""
    leaves, structure = jax.tree.flatten(with_kinds(tree))
    return structure, *leaves


@eqx.filter_jit
def _leaf(recipe, path, record, role, args, client, clients, round, root, address, data):
    f = leaf_of(at(stepwise(recipe.program()), path), role) if record is None else record
    return f(*args, Context(client, clients, round, leaf_key(_walked(root, address), role, client), data))


@eqx.filter_jit
def compute_key(root, address):
    """The key of a server's computation."""
    return leaf_key(_walked(root, address), Role.COMPUTE, 0)


def _walked(root, address):
    key = keys.program_key(root)
    for place in range(address.shape[0]):
        key = jax.random.fold_in(key, address[place])
    return key


@eqx.filter_jit
def _schedule(network, root, step, client, weights):
    everyone = network.links(keys.network_key(root), step, jnp.arange(network.clients), weights)
    rows, alive = weight_rows(everyone, network.clients), alive_rows(everyone, network.clients)
    return everyone.own[client], rows[client], alive[client], alive[:, client]


def links(
    network: Network, key: PRNGKeyArray, step: int, client: int, weights: Weights
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(own weight, weights by receiver, who hears me, whom I hear) of one client at one step."""
    at, me = np.asarray(step, np.int32), np.asarray(client, np.int32)
    found = _shared(type(network), lambda: _schedule(network, key, at, me, weights))
    own, shares, to, heard = (np.asarray(part) for part in found)
    return own, shares, to, heard


@final
class Leaves:
    """The functions of a program as one client calls them: with its number, its data and keys of its own."""

    def __init__(self, recipe: Recipe, client: int, clients: int, draws: PRNGKeyArray, data: PyTree):
        self.client, self.clients, self.draws, self.data = client, clients, draws, data
        self._recipe = recipe.traceable()
        self._kind = _kind(self._recipe)

    def apply(
        self,
        path: Path,
        role: Role,
        address: tuple[int, ...],
        round: int,
        *args: PyTree,
        record: RecordFunction | None = None,
    ) -> Any:
        """What the leaf of that role at a path returns (or a record, which is no leaf of it): f(*args, context)."""
        parts = np.asarray(address, np.uint32)
        me, round_ = np.asarray(self.client, np.int32), np.asarray(round, np.int32)
        given = (args, me, self.clients, round_, self.draws, parts, self.data)
        what = (path, role, _kind(record), len(address), self._kind)
        return _shared(what, lambda: _leaf(self._recipe, path, record, role, *given))

    def shapes(self, f: Callable[..., Any], state: PyTree) -> PyTree:
        """The shapes of `f(state, context)`."""
        me, key = jax.ShapeDtypeStruct((), jnp.int32), jax.eval_shape(lambda: jax.random.key(0))

        def call(state, client, round, key, data):
            return f(state, Context(client, self.clients, round, key, data))

        return jax.eval_shape(call, state, me, me, key, self.data)


def combine(like: PyTree, arrived: list[tuple[int, PyTree, float]], reduce: str, clients: int) -> PyTree:
    """What an inbox holds: the weighted sum, the maximum, or the stack of the others' messages."""

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
    """One client's part of a stacked array. NumPy takes it without compiling anything, but does not know keys."""
    return leaf[client] if is_key(leaf) else jnp.asarray(np.asarray(leaf)[client])


def stacked(rows: Any, axis: int) -> Any:
    """Rows stacked, by NumPy where it can."""
    return jnp.stack(rows, axis) if is_key(rows[0]) else jnp.asarray(np.stack(rows, axis))


def is_key(leaf: Any) -> bool:
    """Whether an array holds random keys."""
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
