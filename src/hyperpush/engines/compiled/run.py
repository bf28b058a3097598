"""The steps of a run in a compiled engine, from the request to the result."""

import abc
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import PyTree

from hyperpush.base import processes
from hyperpush.base.errors import InvalidInput
from hyperpush.engines import keys
from hyperpush.engines.base import Engine, Request
from hyperpush.engines.compiled.effort import Choice, clients_at_a_time, effort
from hyperpush.engines.compiled.hostloop import HostLoop
from hyperpush.engines.compiled.interpreter import Carry, Clock, Interpreter
from hyperpush.engines.compiled.placement import Placement, Sharded, SingleDevice
from hyperpush.engines.compiled.routes import routes
from hyperpush.engines.compiled.tally import Tally
from hyperpush.engines.result import RunResult
from hyperpush.engines.run_checks import check_clients, check_repairable
from hyperpush.engines.totals import Totals
from hyperpush.networks import Network
from hyperpush.networks.trees import WaitingTree, tree_of
from hyperpush.programs import Profile, bytes_of, one_client, profile
from hyperpush.programs.profile import LEARNING


class CompiledEngine(Engine):
    """Engine that runs programs as XLA loops over stacked clients."""

    clients_per_batch: eqx.AbstractVar[int | None]
    compile_fully: eqx.AbstractVar[bool]

    @abc.abstractmethod
    def devices_of_run(self) -> Mesh | None:
        """Return the devices over which clients are spread; None puts all on the default device."""

    def execute(self, request: Request) -> RunResult:
        """Run the program of a request for all clients; see `Engine.run`."""
        network, key, mesh = request.network, request.key, self.devices_of_run()
        found, carry, options = prepare(request)
        size = effort(found, network, options["tree"])
        batch = self.clients_per_batch or clients_at_a_time(found, request.data)
        options |= {"faults": request.faults, "batch": batch, "mesh": mesh}
        options["level"] = "full" if self.compile_fully else Choice(size)
        placement, numbers = placement_on(network, mesh, request.states), request.recipe.traceable()
        context = Interpreter.of(network, placement, request.data, key, numbers, **options)
        loop = HostLoop(context, request, found, size)
        states, sent = context.place((carry.states, carry.sent))
        start = Carry(states, context.replicate(carry.clock), carry.totals, sent)
        return conclude(loop, loop.run(start, context.replicate(keys.program_key(key))), request.step)


def prepare(request: Request) -> tuple[Profile, Carry, dict[str, Any]]:
    """Return the profile of a request's program, its initial carry, and options of its context.

    The options are the fields `agreement`, `tree` and `tree_places` of `RunContext`.
    """
    recipe, network, states, data, _, faults, *_ = request
    check_clients("states", states, network.clients)
    check_clients("data", data, network.clients)
    if faults is not None:
        check_repairable(recipe.program(), True, trees=True)
    found = profile(recipe, one_client(states), one_client(data), network.clients)
    totals = {}
    if faults is not None:
        conserved = [s for s in found.sendings if getattr(s.node, "conserved", False)]
        totals = {s.path: Totals.start(s.message, network.clients, faults.delay) for s in conserved}
    by_tree = found.by_tree
    with jax.ensure_compile_time_eval():  # the tree is planned on the host, even if `evaluate` is being traced
        tree = tree_of(network, faults is not None) if by_tree else None
    learning = [LEARNING] if isinstance(tree, WaitingTree) and tree.learns else []
    places = (*found.width, *learning)
    clock = Clock.start([body for body, _, loop in found.loops if loop.agreed], places, request.step)
    sent = {path: Tally.start(network.clients) for path in places}
    agreement = network.flood_rounds() if found.has_votes else 1
    options = {"agreement": agreement, "tree": tree, "tree_places": by_tree}
    return found, Carry(states, clock, totals, sent), options


def placement_on(network: Network, mesh: Mesh | None, states: PyTree) -> Placement:
    """Return the placement of the clients on the devices of a mesh; None: all on one device."""
    if mesh is None:
        return SingleDevice(network.clients)
    placement = Sharded(network.clients, mesh.size, routes(network, mesh.size, -(-network.clients // mesh.size)))
    if placement.has_padding and processes.count() > 1 and bytes_of(states) > processes.GATHERED:
        # Raised before the run, because its results could not be returned.
        given = f"{network.clients}, with {bytes_of(states) >> 20} MB of states"
        allowed = f"a multiple of the {mesh.size} devices, over which the results stay spread"
        raise InvalidInput("clients", given, allowed)
    return placement


def conclude(loop: HostLoop, carry: Carry, step: int) -> RunResult:
    """Collect a run's results on the host; `step` is the network time at its start."""
    context, found = loop.context, loop.profile
    n, clock = context.network.clients, carry.clock
    agreed = {body: int(times.numbers()) for body, times in clock.passes.items()}
    width, sent = found.bytes | {LEARNING: n * jnp.zeros(()).dtype.itemsize}, np.zeros(n, np.int64)
    for path, count in processes.gather(carry.sent).items():
        sent += width[path] * count.numbers()[:n]
    states, structure = jax.tree.flatten(processes.gather(carry.states))
    whole = [leaf if leaf.shape[0] == n else processes.whole("clients", leaf)[:n] for leaf in states]
    exchanges = {path: count.numbers() for path, count in clock.exchanges.items()}
    return RunResult(
        states=structure.unflatten(whole),
        step=clock.now(),
        rounds=clock.now() - step,
        floats=int(found.floats(exchanges, n)),
        work=found.total(agreed) + loop.extra,
        history=loop.history.result(n),
        late=int(clock.late.numbers()),
        totals=carry.totals,
        clocks=loop.history.row_clocks(clock, n, step),
        bytes=sent,
    )
