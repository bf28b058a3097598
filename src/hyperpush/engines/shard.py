"""A block of clients per device: for more clients or larger models than one device holds.

The interpreter of `Simulate` runs inside `shard_map` over a mesh with the single axis `clients`. XLA collectives carry
messages between devices, in one process or in several. If the clients do not divide evenly, clients without links are
added as padding.
"""

from typing import Any

import equinox as eqx
import jax
from jax.sharding import Mesh

from hyperpush.base.checks import check_boolean, check_integer
from hyperpush.base.errors import InvalidInput
from hyperpush.engines.compiled.placement import AXIS
from hyperpush.engines.compiled.run import CompiledEngine


def _as_tuple(devices: Any) -> Any:
    return tuple(devices) if isinstance(devices, list) else devices


def _are_devices(given: Any) -> bool:
    """Return True for a collection of one or more different devices."""
    return bool(given) and all(isinstance(each, jax.Device) for each in given) and len(set(given)) == len(given)


class Shard(CompiledEngine):
    """Engine with one block of clients per device. By default it uses the devices of all processes.

    Use it if states or data do not fit one device, or if clients compute for much longer than they communicate.
    Otherwise `Simulate` is faster. The results of both engines agree up to rounding.

    Args:
        devices: The devices to use, or a number k ≥ 1 for the first k of `jax.devices()`. None takes all.
        clients_per_batch: Number of clients that a device computes at a time, 1 or more. None computes the whole
            block at once, or one client after another if clients are large, as in `hp.Simulate`.
        compile_fully: True lets XLA spend its full effort on every run, as in `hp.Simulate`.

    Raises:
        InvalidInput: There are too few devices, or an option is out of range.

    Example:
        >>> import hyperpush as hp
        >>> task, network = hp.tasks.quadratic(4, 0), hp.networks.Ring(4)
        >>> hp.train(task, hp.SGP(steps=5, step_size=0.1), network, key=0, engine=hp.Shard(devices=1)).costs.rounds
        5
    """

    devices: int | tuple[Any, ...] | None = eqx.field(static=True, default=None, converter=_as_tuple)
    clients_per_batch: int | None = eqx.field(static=True, default=None)
    compile_fully: bool = eqx.field(static=True, default=False)

    def __check_init__(self):
        self.check_batch(self.clients_per_batch)
        check_boolean("Shard.compile_fully", self.compile_fully)
        if isinstance(self.devices, int):
            check_integer("Shard.devices", self.devices, minimum=1, maximum=jax.device_count())
        elif self.devices is not None and not _are_devices(self.devices):
            raise InvalidInput("Shard.devices", self.devices, "different devices, a number of them, or None for all")

    def devices_of_run(self) -> Mesh:
        chosen = self.devices if isinstance(self.devices, tuple) else jax.devices()[: self.devices]
        return Mesh(list(chosen), (AXIS,))
