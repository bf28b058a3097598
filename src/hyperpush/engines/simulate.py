"""Engine with all clients on one device, stacked on axis 0: the default, made for research."""

from collections.abc import Mapping

import equinox as eqx
import jax
from jax.sharding import Mesh
from jaxtyping import PRNGKeyArray, PyTree

from hyperpush.base import processes
from hyperpush.base.checks import check_boolean
from hyperpush.engines import keys
from hyperpush.engines.base import Request, ambient, surround
from hyperpush.engines.compiled.compile import Level
from hyperpush.engines.compiled.effort import Choice, effort
from hyperpush.engines.compiled.interpreter import Visit
from hyperpush.engines.compiled.placement import SingleDevice
from hyperpush.engines.compiled.run import CompiledEngine, prepare
from hyperpush.engines.compiled.whole import Recorded
from hyperpush.engines.faults import Faults
from hyperpush.engines.planning import ones
from hyperpush.engines.result import Record, recorders_of
from hyperpush.networks import Network
from hyperpush.networks.trees import tree_of
from hyperpush.programs import Node, ProgramRecipe, as_recipe, one_client, profile


class Simulate(CompiledEngine):
    """Engine with all clients on one device, vectorized: the default, and the fastest if states and data fit there.

    With several processes, each holds a part of the clients, as in `Shard`. With faulty links each holds all of them.

    Args:
        clients_per_batch: Number of clients that are computed at a time, 1 or more. 1 takes the least memory. None
            computes all at once if clients are small. Large clients are computed one after another, which is as fast
            and stores activations of one client only. A client is large if its state and the largest array that it
            computes take more than 1 MB and more than its data.
        faults: Faults of the links. None: reliable links.
        compile_fully: True compiles every run with all XLA optimizations. False compiles long programs with little
            work with fewer optimizations. Their first calls are a fifth to a half shorter, later calls take up to
            1.5 times as long, and results differ by rounding. Choose True to repeat such a run a thousand times.

    Raises:
        InvalidInput: An option is out of range.

    Example:
        >>> import hyperpush as hp
        >>> task, network = hp.tasks.quadratic(4, 0), hp.networks.Ring(4)
        >>> engine = hp.Simulate(clients_per_batch=1)
        >>> hp.train(task, hp.SGP(steps=5, step_size=0.1), network, key=0, engine=engine).costs.rounds
        5
    """

    clients_per_batch: int | None = eqx.field(static=True, default=None)
    faults: Faults | None = None
    compile_fully: bool = eqx.field(static=True, default=False)

    def __check_init__(self):
        self.check_batch(self.clients_per_batch)
        self.check_faults(self.faults)
        check_boolean("Simulate.compile_fully", self.compile_fully)

    def level_of(
        self, recipe: ProgramRecipe, network: Network, states: PyTree, data: PyTree, runs: int = 1
    ) -> Level | Choice:
        """Return the level of compiler optimizations for a program that evaluates the recipe `runs` times."""
        if self.compile_fully:
            return "full"
        found = profile(recipe, one_client(states), one_client(data), network.clients)
        tree = tree_of(network, self.faults is not None) if found.by_tree else None
        return Choice(runs * effort(found, network, tree))

    def devices_of_run(self) -> Mesh | None:
        return processes.mesh() if processes.count() > 1 and self.faults is None else None


def evaluate(
    program: Node | ProgramRecipe,
    network: Network,
    states: PyTree,
    data: PyTree,
    key: PRNGKeyArray,
    *,
    step: int = 0,
    record: Mapping[str, Record] | None = None,
    every: int = 1,
    clients_per_batch: int | None = None,
    faults: Faults | None = None,
) -> tuple[PyTree, dict[str, PyTree]]:
    """Run a program as one pure function, for use inside `jit`, or `vmap` over keys, states or numbers.

    Without such a transformation use `Simulate().run`: it counts costs and checks that numbers are finite.
    Only outermost loops can be recorded.

    Args:
        program: The program of one client.
        network: The links between clients.
        states: Every client's initial state, clients on axis 0.
        data: Every client's private data, clients on axis 0.
        key: Random key, from which all draws follow.
        step: Network time at the start.
        record: Values to record in loops, by the loop's name: a `Recorder`, or a function of one client's state and
            context. None records nothing.
        every: Number of iterations between recorded rows, 1 or more.
        clients_per_batch: Number of clients that are computed at a time, 1 or more; None: all at once.
        faults: Faults of the links; None: reliable links.

    Returns:
        All clients' final states, and records by name of the loop, leaves [rows, clients, …].

    Example:
        >>> import jax, jax.numpy as jnp, hyperpush as hp
        >>> double = hp.programs.Repeat(hp.programs.Local(lambda x, ctx: 2 * x), 3)
        >>> run = lambda x: hp.extend.evaluate(double, hp.networks.Ring(2), x, None, jax.random.key(0))[0]
        >>> jax.jit(jax.vmap(run))(jnp.ones((1, 2))).tolist()
        [[8.0, 8.0]]
    """
    recipe = as_recipe(program)

    def compute(states: PyTree, data: PyTree) -> tuple[PyTree, dict[str, PyTree]]:
        program = recipe.program()
        _, carry, options = prepare(Request(recipe, network, states, data, key, faults, step))
        options |= {"faults": faults, "batch": clients_per_batch, "recorders": recorders_of(record), "every": every}
        run = Recorded.of(network, SingleDevice(network.clients), data, key, recipe, **options)
        after = run.run(Visit(program, keys.program_key(key)), carry)
        return after.states, {name: rows.records for name, rows in run.rows.items()}

    if ambient().engine is None:
        return compute(states, data)
    with surround():  # a planned run computes nothing: only the shapes are needed
        return ones(jax.eval_shape(compute, states, data))
