"""All clients on one device, stacked on axis 0: the engine for research, and the default."""

from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import PRNGKeyArray, PyTree

from hyperpush import processes
from hyperpush.engines import keys, planning
from hyperpush.engines.base import Engine
from hyperpush.engines.compiled import Walk, conclude
from hyperpush.engines.faults import Faults
from hyperpush.engines.interpret import with_states
from hyperpush.engines.layout import Plan, lay_out
from hyperpush.engines.placement import Whole
from hyperpush.engines.result import Progress, Record, RunResult, recorders_of
from hyperpush.engines.shard import Shard
from hyperpush.engines.spent import both_ways
from hyperpush.networks import Network
from hyperpush.programs import Node, Recipe, Repeat, Role, Scope, Sequence, as_recipe

_planned: ContextVar[bool] = ContextVar("planned", default=False)


def _compute(options, static, carry, *arguments):
    function, network, *rest = options
    plan = Plan(Whole(network.clients), network, *rest)
    return function(plan, *static, carry, *arguments)


_compiled, _overwriting = both_ways(_compute)


class Simulate(Engine):
    """All clients on one device, vectorized.

    Args:
        clients_per_batch: How many clients are computed at a time. None computes all at once; 1 takes the least
            memory, for large models.
        faults: What the links do to messages. None: nothing is lost, repeated or late.

    In a run of several processes the clients are spread over them (`Shard`), unless links are faulty.
    """

    clients_per_batch: int | None = eqx.field(static=True, default=None)
    faults: Faults | None = None

    def __check_init__(self):
        self.check_batch(self.clients_per_batch)
        self.check_faults(self.faults)

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
        if processes.count() > 1 and self.faults is None:
            spread = Shard(clients_per_batch=self.clients_per_batch)
            options: Any = {"step": step, "record": record, "every": every, "progress": progress}
            return spread.run(program, network, states, data, key, **options)
        recipe = as_recipe(program)
        tree, found, carry, agreement = lay_out(recipe, network, states, data, self.faults, step)
        options = (network, data, key, self.faults, agreement, self.clients_per_batch, recipe.traceable())

        def compiled(function, plan, static, *arguments: Any, spent: PyTree = None):
            if spent is None:
                return _compiled((function, *options), static, *arguments)
            return _overwriting(((function, *options), static, *arguments), spent)

        walk = Walk(
            Plan(Whole(network.clients), *options), tree, found, compiled, recorders_of(record), every, progress
        )
        carry = walk.run(tree, carry, keys.program_key(key))
        return conclude(walk, carry, step)


def evaluate(
    program: Node | Recipe,
    network: Network,
    states: PyTree,
    data: PyTree,
    key: PRNGKeyArray,
    *,
    step: int = 0,
    record: Mapping[str, Record] | None = None,
    every: int = 1,
    clients_per_batch: int | None = None,
) -> tuple[PyTree, dict[str, PyTree]]:
    """The same as one pure function: final states and history. To be jitted, and vmapped over keys, states or numbers.

    Only loops that stand in no other loop can be recorded; nothing checks that numbers are finite.
    """
    if planning.current() is not None and not _planned.get():
        _planned.set(True)
        try:  # a planned run computes nothing: only the shapes are needed
            options: Any = {"step": step, "record": record, "every": every, "clients_per_batch": clients_per_batch}

            def shapes(states: PyTree, data: PyTree) -> Any:
                return evaluate(program, network, states, data, key, **options)

            return planning.ones(jax.eval_shape(shapes, states, data))
        finally:
            _planned.set(False)
    recorders = recorders_of(record)
    recipe = as_recipe(program)
    tree, _, carry, agreement = lay_out(recipe, network, states, data, None, step)
    interpreter = Plan(
        Whole(network.clients), network, data, key, None, agreement, clients_per_batch, recipe
    ).interpreter()
    history = {}

    def walk(node, carry, key, path):
        if isinstance(node, Sequence):
            for position, child in enumerate(node.nodes):
                carry = walk(child, carry, jax.random.fold_in(key, position), (*path, position))
            return carry
        if isinstance(node, Repeat) and node.name in recorders:
            recorder = recorders[node.name]
            buffers = interpreter.buffers(recorder, carry, node.at_most // every + recorder.entry)
            zero = jnp.zeros((), jnp.int32)
            carry, (history[node.name], _), *_ = interpreter.loop(
                node, carry, key, zero, path, 0, node.at_most, recorder, buffers, every
            )
            return carry
        zero = jnp.zeros((), jnp.int32)
        if isinstance(node, Scope):
            inner = with_states(carry, interpreter.apply(node.enter, Role.ENTER, key, zero, carry.states))
            after = walk(node.body, inner, key, (*path, 0))
            return with_states(after, interpreter.apply(node.leave, Role.LEAVE, key, zero, carry.states, after.states))
        return interpreter.run(node, carry, key, zero, path)

    carry = walk(tree, carry, keys.program_key(key), ())
    return carry.states, history


DEFAULT = Simulate()  # where no other engine is named
