"""A block of clients per device: for more clients or larger models than one device holds.

The same interpreter as `simulate`, inside `shard_map` over a mesh with the single axis `clients`; messages cross
devices, of one process or of several, by XLA collectives. Clients that do not divide evenly are padded with ones that
talk to nobody.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import PRNGKeyArray, PyTree

from hyperpush import planning, processes
from hyperpush.engine import keys
from hyperpush.engine.compiled import Walk, chunk, conclude
from hyperpush.engine.faults import Faults
from hyperpush.engine.interpret import Carry
from hyperpush.engine.layout import Plan, lay_out
from hyperpush.engine.outcome import Outcome, Progress, Record
from hyperpush.engine.placement import AXIS, Slice
from hyperpush.engine.routes import routes
from hyperpush.engine.spent import both_ways
from hyperpush.errors import InvalidInput
from hyperpush.networks import Network
from hyperpush.program import Node


def _compute(options, static, carry, *scalars):
    function, mesh, routes, network, data, key, agreement, batch = options
    arrays, rest = eqx.partition(network, eqx.is_array)
    placement = Slice(network.clients, mesh.size, routes)

    def block(arrays, data, key, states, clock, scalars):
        plan = Plan(placement, eqx.combine(arrays, rest), data, key, None, agreement, batch)
        after, *others = function(plan, *static, Carry(states, clock, {}), *scalars)
        return after.states, after.clock, tuple(others)

    # Whether all is finite; a chunk also returns its records (clients on axis 1), the next iteration, and its end.
    others = (P(), P(None, AXIS), P(), P()) if function is chunk else (P(),)
    states, clock, others = jax.shard_map(
        block,
        mesh=mesh,
        in_specs=(P(), P(AXIS), P(), P(AXIS), P(), P()),
        out_specs=(P(AXIS), P(), others),
        check_vma=False,
    )(arrays, data, key, carry.states, carry.clock, scalars)
    return Carry(states, clock, {}), *others


_compiled, _overwriting = both_ways(_compute)


def run(
    program: Node,
    network: Network,
    states: PyTree,
    data: PyTree,
    key: PRNGKeyArray,
    *,
    devices: Sequence[Any] | None = None,
    step: int = 0,
    record: Mapping[str, Record] | None = None,
    every: int = 1,
    faults: Faults | None = None,
    batch: int | None = None,
    progress: Progress | None = None,
) -> Outcome:
    """Run a program with the clients spread over `devices` (all of all processes by default); as `simulate.run`."""
    if faults is not None:
        raise InvalidInput("faults", faults, "None: faulty links are for simulate and peer")
    devices = jax.devices() if devices is None else list(devices)
    if not devices:
        raise InvalidInput("devices", devices, "at least one device")
    mesh = Mesh(devices, (AXIS,))
    found, carry, agreement = lay_out(program, network, states, data, None, step)
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
    plan = Plan(placement, network, place(data), key, None, agreement, batch)

    def compiled(function, plan: Plan, static, *arguments: Any, spent: PyTree = None):
        routes = placement.routes
        options = (function, mesh, routes, plan.network, plan.data, plan.key, plan.agreement, plan.batch)
        if spent is None:
            return _compiled(options, static, *arguments)
        return _overwriting((options, static, *arguments), spent)

    specs = {"states": by_client, "clock": everywhere, "history": NamedSharding(mesh, P(None, AXIS))}
    walk = Walk(plan, program, compiled, record or {}, every, progress, specs.get, place)
    carry = walk.run(program, Carry(place(states), clock, {}), keys.program_key(key))
    return conclude(walk, carry, found, step)


def padded(leaf: Any, rows: int) -> Any:
    """So many more rows, copies of the last."""
    return jnp.concatenate([leaf, jnp.repeat(jnp.asarray(leaf[-1:]), rows, axis=0)]) if rows else leaf
