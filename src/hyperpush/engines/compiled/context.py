"""The context that all compiled parts of a run share, and the placement of its arrays on devices."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, PRNGKeyArray, PyTree

from hyperpush.base import processes
from hyperpush.engines import keys
from hyperpush.engines.compiled.compile import Level
from hyperpush.engines.compiled.effort import Choice
from hyperpush.engines.compiled.placement import AXIS, Placement
from hyperpush.engines.faults import Faults
from hyperpush.networks import Network
from hyperpush.networks.trees import Tree
from hyperpush.programs import Path, ProgramRecipe

R = TypeVar("R", bound="RunContext")


class RunContext(eqx.Module):
    """The fixed inputs of a run: its network, its clients' data, its keys, and the placement of clients on devices."""

    network: Network
    placement: Placement
    data: PyTree
    network_key: PRNGKeyArray  # key for the network's random links
    faults_key: PRNGKeyArray
    recipe: ProgramRecipe
    faults: Faults | None = None
    tree: Tree | None = None  # None for programs without averages along a tree
    tree_places: tuple[Path, ...] = eqx.field(static=True, default=())  # paths of averages along the tree
    agreement: int = eqx.field(static=True, default=1)  # number of max-consensus rounds until all clients agree
    batch: int | None = eqx.field(static=True, default=None)  # clients per vectorized batch; None: all at once
    level: Level | Choice = eqx.field(static=True, default="full")  # compiler optimizations, see `compile.py`
    mesh: Mesh | None = eqx.field(static=True, default=None)  # None: all clients on one device

    @classmethod
    def of(
        cls: type[R],
        network: Network,
        placement: Placement,
        data: PyTree,
        key: PRNGKeyArray,
        recipe: ProgramRecipe,
        **options,
    ) -> R:
        """Return the context of a run with this key, and put each client's data on its device.

        `options` are the other fields.
        """
        bare = cls(network, placement, None, key, key, recipe, **options)
        own = bare.replicate((keys.network_key(key), keys.faults_key(key)))
        return replace(bare, data=bare.place(data), network_key=own[0], faults_key=own[1])

    def place(self, tree: PyTree) -> PyTree:
        """Put the rows of each client on its device; the padding repeats the last client's rows."""
        if self.mesh is None:
            return tree
        by_client, n = NamedSharding(self.mesh, P(AXIS)), self.network.clients

        def one(leaf: Any) -> Any:
            if processes.spread(leaf) and not self.placement.has_padding:
                return leaf if leaf.sharding == by_client else jax.device_put(leaf, by_client)
            whole = processes.whole("clients", leaf)
            if missing := self.placement.padded - n:
                whole = jnp.concatenate([whole, jnp.repeat(jnp.asarray(whole[-1:]), missing, axis=0)])
            return processes.put(whole, by_client)

        return jax.tree.map(one, tree)

    def replicate(self, tree: PyTree) -> PyTree:
        """Put a copy of all arrays on every device."""
        if self.mesh is None:
            return tree
        everywhere = NamedSharding(self.mesh, P())
        return jax.tree.map(lambda leaf: processes.put(leaf, everywhere), tree)

    def assemble(self, shape: tuple[int, ...], axis: int, read: Callable[[int, int], np.ndarray]) -> Array:
        """Return an array with clients on `axis`, each on its device.

        `read(first, end)` returns the part of clients `first` to `end` − 1.
        """
        n = self.network.clients
        if self.mesh is None:
            return jnp.asarray(read(0, n))
        padded = (*shape[:axis], self.placement.padded, *shape[axis + 1 :])

        def block(index: Any) -> np.ndarray:
            wanted = np.minimum(np.arange(padded[axis])[index[axis]], n - 1)  # padding: copies of the last client
            first, last = int(wanted[0]), int(wanted[-1])
            return np.take(read(first, last + 1), wanted - first, axis)

        return jax.make_array_from_callback(padded, NamedSharding(self.mesh, P(*[None] * axis, AXIS)), block)
