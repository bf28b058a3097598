"""A block of clients per device: for more clients or larger models than one device holds.

The interpreter of `Simulate`, inside `shard_map` over a mesh with the single axis `clients`; messages cross devices, of
one process or of several, by XLA collectives. Clients that do not divide evenly are padded with ones that talk to
nobody.
"""

from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import PRNGKeyArray, PyTree

from hyperpush import processes
from hyperpush.checks import check_integer
from hyperpush.engines import keys, planning
from hyperpush.engines.base import Engine
from hyperpush.engines.compiled import Walk, chunk, conclude
from hyperpush.engines.interpret import Carry
from hyperpush.engines.layout import Plan, lay_out
from hyperpush.engines.placement import AXIS, Slice
from hyperpush.engines.result import Progress, Record, RunResult, recorders_of
from hyperpush.engines.routes import routes
from hyperpush.engines.spent import both_ways
from hyperpush.errors import InvalidInput
from hyperpush.networks import Network
from hyperpush.programs import Node, Recipe, as_recipe


def _compute(options, static, carry, *scalars):
    function, mesh, routes, network, data, key, agreement, batch, recipe = options
    arrays, rest = eqx.partition((network, recipe, static), eqx.is_array)
    placement = Slice(network.clients, mesh.size, routes)

    def block(arrays, data, key, rows, clock, scalars):
        network, recipe, static = eqx.combine(arrays, rest)
        plan = Plan(placement, network, data, key, None, agreement, batch, recipe)
        states, sent = rows
        after, *others = function(plan, *static, Carry(states, clock, {}, sent), *scalars)
        return (after.states, after.sent), after.clock, tuple(others)

    # Whether all is finite; a chunk also returns its records (clients on axis 1) and when they were made, the next
    # iteration, and whether it ended.
    others = (P(), P(None, AXIS), P(), P(), P()) if function is chunk else (P(),)
    (states, sent), clock, others = jax.shard_map(
        block,
        mesh=mesh,
        in_specs=(P(), P(AXIS), P(), P(AXIS), P(), P()),
        out_specs=(P(AXIS), P(), others),
        check_vma=False,
    )(arrays, data, key, (carry.states, carry.sent), carry.clock, scalars)
    return Carry(states, clock, {}, sent), *others


_compiled, _overwriting = both_ways(_compute)


def _frozen(devices: Any) -> Any:
    return tuple(devices) if isinstance(devices, list) else devices


class Shard(Engine):
    """A block of clients per device, with the devices of all processes by default.

    Args:
        devices: Which devices. A number takes the first of `jax.devices()`; None takes all.
        clients_per_batch: How many clients a device computes at a time; None computes all of its block at once.
    """

    devices: int | tuple[Any, ...] | None = eqx.field(static=True, default=None, converter=_frozen)
    clients_per_batch: int | None = eqx.field(static=True, default=None)

    def __check_init__(self):
        self.check_batch(self.clients_per_batch)
        if isinstance(self.devices, int):
            check_integer("Shard.devices", self.devices, minimum=1, maximum=jax.device_count())
        elif self.devices is not None and not (
            self.devices and all(isinstance(each, jax.Device) for each in self.devices)
        ):
            raise InvalidInput("Shard.devices", self.devices, "at least one device, a number of them, or None for all")

    def chosen(self) -> list[Any]:
        """The devices that clients are spread over."""
        if isinstance(self.devices, tuple):
            return list(self.devices)
        return jax.devices()[: self.devices]

    def run(
        self,
        program: Node | Recipe,
        network: Network,
        states: PyTree,
        data: PyTree,
        key: PRNGKeyArray,
        *,
        step: int = 0,
        record: Mapping[str, Record] | None = None,
        every: int = 1,
        progress: Progress | None = None,
    ) -> RunResult:
        """See `Engine.run`."""
        mesh = Mesh(self.chosen(), (AXIS,))
        recipe = as_recipe(program)
        tree, found, carry, agreement = lay_out(recipe, network, states, data, None, step)
        block = Slice(network.clients, mesh.size).block
        placement = Slice(network.clients, mesh.size, routes(network, mesh.size, block))
        large = processes.count() > 1 and planning.size(states) > processes.GATHERED
        if large and placement.has_padding:  # before hours are spent on results that nobody can have
            given = f"{network.clients}, with {planning.size(states) >> 20} MB of states"
            raise InvalidInput(
                "clients", given, f"a multiple of the {mesh.size} devices, over which the results stay spread"
            )
        by_client, everywhere = NamedSharding(mesh, P(AXIS)), NamedSharding(mesh, P())

        def place(tree: PyTree) -> PyTree:
            """Every client's rows where it is hosted, and copies of the last client's for padding."""
            missing = placement.padded - placement.clients

            def one(leaf):
                if processes.spread(leaf) and not missing:
                    return leaf if leaf.sharding == by_client else jax.device_put(leaf, by_client)
                return processes.put(padded(processes.whole("clients", leaf), missing), by_client)

            return jax.tree.map(one, tree)

        key = processes.put(key, everywhere)
        clock = jax.tree.map(lambda leaf: processes.put(leaf, everywhere), carry.clock)
        batch, numbers = self.clients_per_batch, recipe.traceable()
        plan = Plan(placement, network, place(data), key, None, agreement, batch, numbers)

        def compiled(function, plan: Plan, static, *arguments: Any, spent: PyTree = None):
            shared = (plan.network, plan.data, plan.key, plan.agreement, plan.batch, plan.recipe)
            options = (function, mesh, placement.routes, *shared)
            if spent is None:
                return _compiled(options, static, *arguments)
            return _overwriting((options, static, *arguments), spent)

        specs = {"states": by_client, "clock": everywhere, "history": NamedSharding(mesh, P(None, AXIS))}
        walk = Walk(plan, tree, found, compiled, recorders_of(record), every, progress, specs.get, place)
        carry = walk.run(tree, Carry(place(states), clock, {}, place(carry.sent)), keys.program_key(key))
        return conclude(walk, carry, step)


def padded(leaf: Any, rows: int) -> Any:
    """So many more rows, copies of the last."""
    return jnp.concatenate([leaf, jnp.repeat(jnp.asarray(leaf[-1:]), rows, axis=0)]) if rows else leaf
