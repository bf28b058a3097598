"""Plan which rows devices send to each other, so that only clients with a link between them exchange rows."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from hyperpush.networks import Network

_DENSE = 2048  # largest number of clients whose dense links are searched


@dataclass(frozen=True)
class Routes:
    """Layout of the buffer in which a device collects the rows that it sends.

    First come the rows for its own clients. Then come, for each shift s, the rows for the device s places further. The
    table is stored as bytes, so that equal routes are compiled once.
    """

    shifts: tuple[int, ...]
    sizes: tuple[int, ...]  # rows sent over each shift, the same on every device
    clients: int
    table: bytes

    def destinations(self, devices: int) -> Int[np.ndarray, "devices rows"]:
        """Return the target client of each row of each device's buffer; `clients` for unused rows."""
        return np.frombuffer(self.table, np.int32).reshape(devices, -1)

    def places(self, devices: int) -> Int[np.ndarray, "devices clients"]:
        """Return the row of each client in each device's buffer; 0 for clients without a live link from the device."""
        found = np.zeros((devices, self.clients + 1), np.int32)
        for device, row in enumerate(self.destinations(devices)):
            found[device, row] = np.arange(len(row))
        return found[:, :-1]


def routes(network: Network, devices: int, block: int) -> Routes | None:
    """Return the routes for a network's links. None for random links, or if a reduce-scatter moves no more rows."""
    if devices == 1 or (network.varying and network.period() == 1):
        return None
    links = jax.eval_shape(lambda: network.links(jax.random.key(0), 0, jnp.arange(1), "ones"))
    if links.targets is None and network.clients > _DENSE:
        return None
    possible = network.possible().tocoo()
    pairs = np.unique(np.stack([possible.row // block, possible.col]), axis=1)
    shift = (pairs[1] // block - pairs[0]) % devices
    shifts = tuple(int(each) for each in np.unique(shift) if each)
    rows: list[list[np.ndarray]] = []
    for each in shifts:
        leaving = shift == each
        rows.append([pairs[1][leaving & (pairs[0] == device)] for device in range(devices)])
    sizes = tuple(max(len(ids) for ids in by_device) for by_device in rows)
    if sum(sizes) >= (devices - 1) * block:
        return None
    table = np.full((devices, block + sum(sizes)), network.clients, np.int32)
    for device in range(devices):
        own = np.arange(device * block, (device + 1) * block)
        table[device, :block] = np.minimum(own, network.clients)
        start = block
        for size, by_device in zip(sizes, rows, strict=True):
            table[device, start : start + len(by_device[device])] = by_device[device]
            start += size
    return Routes(shifts, sizes, network.clients, table.tobytes())
