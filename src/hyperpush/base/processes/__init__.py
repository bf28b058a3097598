"""Run one program in several processes, on one machine or on many, with arrays that are spread over the processes.

Every process runs the same program. A spread array keeps each client's rows in the process that hosts the client.
"""

import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import PyTree

from hyperpush.base.errors import InvalidInput

AXIS = "clients"

# Spread results of up to this size in bytes are copied to every process, which can then use them like local arrays.
GATHERED = 1 << 28


def count() -> int:
    """Return the number of processes of this run."""
    return jax.process_count()


def first_process() -> bool:
    """Return True in the process that writes results: process 0."""
    return jax.process_index() == 0


def join(coordinator: str | None, processes: int | None, index: int | None) -> None:
    """Join a run of several processes as process `index`, by the address of its coordinator (process 0).

    JAX reads arguments that are None from the environment of a cluster.
    """
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        # By default the coordinator would listen on every interface of its machine.
        known = coordinator or os.environ.get("JAX_COORDINATOR_ADDRESS", "")
        own = known if known.startswith(("127.", "localhost:", "[::1]:")) else None
        jax.distributed.initialize(
            coordinator, processes, index, heartbeat_timeout_seconds=30, coordinator_bind_address=own
        )
    except Exception as error:
        given = f"{coordinator or 'the environment'}, process {index} of {processes}"
        said = " ".join(str(error).split())[:200]
        raise InvalidInput("--coordinator", given, f"an address that all processes can reach ({said})") from None


def barrier(name: str) -> None:
    """Wait until all processes have reached the barrier with this name."""
    if count() > 1:
        multihost_utils.sync_global_devices(name)


def gather_texts(text: str) -> list[str]:
    """Return the texts that all processes pass to this call, in the order of the processes."""
    if count() == 1:
        return [text]
    data = text.encode()
    longest = int(np.max(multihost_utils.process_allgather(np.int32(len(data)))))
    said = multihost_utils.process_allgather(np.frombuffer(data.ljust(longest, b"\0"), np.uint8))
    return [bytes(row).rstrip(b"\0").decode() for row in np.asarray(said, np.uint8)]


def agree(first: bool, anyone: bool) -> tuple[bool, bool]:
    """Return the value of `first` in the first process, and True if `anyone` is True in any process."""
    said = gather_texts(f"{first:d}{anyone:d}")
    return said[0][0] == "1", any(each[1] == "1" for each in said)


def mesh() -> Mesh:
    """Return a one-dimensional mesh of all devices of all processes."""
    return Mesh(np.asarray(jax.devices()), (AXIS,))


def spread(leaf: object) -> bool:
    """Return True for an array that is spread over processes, so that each process holds only a part."""
    return isinstance(leaf, jax.Array) and not leaf.is_fully_addressable


def visible(leaf: Any) -> np.ndarray:
    """Return the part of an array that this process holds: the whole array, or the rows of its own clients."""
    if not spread(leaf):
        return np.asarray(leaf)
    return np.concatenate([np.asarray(shard.data) for shard in leaf.addressable_shards])


def put(leaf: Any, sharding: NamedSharding) -> jax.Array:
    """Spread an array that every process holds: each process keeps only its own part."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        impl = str(jax.random.key_impl(leaf))
        return jax.random.wrap_key_data(put(jax.random.key_data(leaf), sharding), impl=impl)
    if jax.process_count() == 1:
        return jax.device_put(leaf, sharding)
    local = np.asarray(leaf)
    return jax.make_array_from_callback(local.shape, sharding, lambda index: local[index])


def gather(tree: PyTree) -> PyTree:
    """Copy the spread arrays of a tree to every process, unless they have more than `GATHERED` bytes in total."""
    if count() == 1:  # arrays are not spread
        return tree
    if sum(leaf.nbytes for leaf in jax.tree.leaves(tree) if spread(leaf)) > GATHERED:
        return tree

    def one(leaf: Any) -> Any:
        if not spread(leaf):
            return leaf
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.wrap_key_data(one(jax.random.key_data(leaf)), impl=str(jax.random.key_impl(leaf)))
        if leaf.is_fully_replicated:
            return jnp.asarray(np.asarray(leaf))
        return jnp.asarray(multihost_utils.process_allgather(leaf, tiled=True))

    return jax.tree.map(one, tree)


def own_clients(leaf: jax.Array) -> list[tuple[int, np.ndarray]]:
    """Return the clients whose rows of a spread array are in this process, each with its row."""
    return [
        (number, row)
        for shard in leaf.addressable_shards
        if shard.replica_id == 0
        for number, row in enumerate(np.asarray(shard.data), shard.index[0].start or 0)
    ]


def whole(name: str, leaf: Any) -> Any:
    """Return an array if this process holds all of it, else raise InvalidInput with advice."""
    if spread(leaf):
        given = f"{leaf.nbytes >> 20} MB in several processes"
        allowed = f"at most {GATHERED >> 20} MB, a number of clients that the devices divide, or processes.visible"
        raise InvalidInput(name, given, allowed)
    return leaf


def stack(make: Callable[[int], PyTree], clients: int) -> PyTree:
    """Stack the trees `make(client)` of all clients on axis 0; each process makes only the trees of its own clients.

    Use it for data and params that are too large for one process. The number of clients must be a multiple of the
    number of devices.
    """

    def block(first: int, end: int) -> PyTree:
        made = [make(client) for client in range(first, end)]
        return jax.tree.map(lambda *rows: np.stack([np.asarray(row) for row in rows]), *made)

    return stack_blocks(block, clients)


def stack_blocks(make: Callable[[int, int], PyTree], clients: int) -> PyTree:
    """Do the same as `stack` with a function `make(first, end)`, which returns clients `first` to `end` − 1 stacked."""
    devices = jax.device_count()
    if clients % devices:
        raise InvalidInput("clients", clients, f"a multiple of the {devices} devices that they are spread over")
    sharding, block = NamedSharding(mesh(), P(AXIS)), clients // devices
    blocks = [
        jax.device_put(make(place * block, (place + 1) * block), device)
        for place, device in enumerate(mesh().devices.flat)
        if device.process_index == jax.process_index()
    ]

    def join_blocks(*parts: jax.Array) -> jax.Array:
        shape = (clients, *parts[0].shape[1:])
        return jax.make_array_from_single_device_arrays(shape, sharding, list(parts))

    return jax.tree.map(join_blocks, *blocks)


def by_client(f: Callable[..., PyTree], *trees: PyTree) -> PyTree:
    """Compile a function and return f(*trees); the arrays that f takes and returns have clients on axis 0.

    If some arrays are spread, every process computes the part of its own clients, and small results are copied to all
    processes.
    """
    if not any(spread(leaf) for leaf in jax.tree.leaves(trees)):
        return jax.jit(f)(*trees)
    sharding = NamedSharding(mesh(), P(AXIS))
    placed = jax.tree.map(lambda leaf: leaf if spread(leaf) else put(leaf, sharding), trees)
    own = jax.shard_map(f, mesh=mesh(), in_specs=P(AXIS), out_specs=P(AXIS), check_vma=False)
    return gather(jax.jit(own)(*placed))
