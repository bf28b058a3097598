"""All clients on one device, stacked on axis 0: the engine for research, and the default."""

from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PRNGKeyArray, PyTree

from hyperpush import planning, processes
from hyperpush.engine import keys
from hyperpush.engine.compiled import Walk, conclude, recorded_rows
from hyperpush.engine.faults import Faults
from hyperpush.engine.interpret import with_states
from hyperpush.engine.layout import Plan, lay_out
from hyperpush.engine.outcome import Outcome, Progress, Record
from hyperpush.engine.placement import Whole
from hyperpush.engine.spent import both_ways
from hyperpush.networks import Network
from hyperpush.program import Node, Repeat, Role, Sequence, Within

_planned: ContextVar[bool] = ContextVar("planned", default=False)


def _compute(options, static, carry, *arguments):
    function, network, data, key, faults, agreement, batch = options
    plan = Plan(Whole(network.clients), network, data, key, faults, agreement, batch)
    return function(plan, *static, carry, *arguments)


_compiled, _overwriting = both_ways(_compute)


def run(
    program: Node,
    network: Network,
    states: PyTree,
    data: PyTree,
    key: PRNGKeyArray,
    *,
    step: int = 0,
    record: Mapping[str, Record] | None = None,
    every: int = 1,
    faults: Faults | None = None,
    batch: int | None = None,
    progress: Progress | None = None,
) -> Outcome:
    """Run a program for all clients.

    `record` maps names of loops to functions of one client's state, called after every `every`-th iteration. `batch`
    is the number of clients computed at a time (all at once by default), which bounds memory for large models.

    In a run of several processes the clients are spread over them (`shard`), unless links are faulty.
    """
    if processes.count() > 1 and faults is None:
        from hyperpush.engine import shard

        options: Any = {"step": step, "record": record, "every": every, "batch": batch, "progress": progress}
        return shard.run(program, network, states, data, key, **options)
    found, carry, agreement = lay_out(program, network, states, data, faults, step)
    plan = Plan(Whole(network.clients), network, data, key, faults, agreement, batch)

    def compiled(function, plan, static, *arguments: Any, spent: PyTree = None):
        options = (function, plan.network, plan.data, plan.key, plan.faults, plan.agreement, plan.batch)
        if spent is None:
            return _compiled(options, static, *arguments)
        return _overwriting((options, static, *arguments), spent)

    walk = Walk(plan, program, compiled, record or {}, every, progress)
    carry = walk.run(program, carry, keys.program_key(key))
    return conclude(walk, carry, found, step)


def evaluate(
    program: Node,
    network: Network,
    states: PyTree,
    data: PyTree,
    key: PRNGKeyArray,
    *,
    step: int = 0,
    record: Mapping[str, Record] | None = None,
    every: int = 1,
    batch: int | None = None,
) -> tuple[PyTree, dict[str, PyTree]]:
    """The same as one pure function, to be jitted and vmapped over keys, states or data: final states and history.

    Only loops that stand in no other loop can be recorded; nothing checks that numbers are finite.
    """
    if planning.current() is not None and not _planned.get():
        _planned.set(True)
        try:  # a planned run computes nothing: only the shapes are needed
            options: Any = {"step": step, "record": record, "every": every, "batch": batch}

            def shapes(states: PyTree, data: PyTree) -> Any:
                return evaluate(program, network, states, data, key, **options)

            return planning.ones(jax.eval_shape(shapes, states, data))
        finally:
            _planned.set(False)
    recorders = record or {}
    _, carry, agreement = lay_out(program, network, states, data, None, step)
    interpreter = Plan(Whole(network.clients), network, data, key, None, agreement, batch).interpreter()
    history = {}

    def walk(node, carry, key, path):
        if isinstance(node, Sequence):
            for position, child in enumerate(node.nodes):
                carry = walk(child, carry, jax.random.fold_in(key, position), (*path, position))
            return carry
        if isinstance(node, Repeat) and node.name in recorders:
            recorder = recorders[node.name]
            rows = recorded_rows(interpreter, recorder, carry, node.at_most // every)
            zero = jnp.zeros((), jnp.int32)
            carry, history[node.name], *_ = interpreter.loop(
                node, carry, key, zero, path, 0, node.at_most, recorder, rows, every
            )
            return carry
        zero = jnp.zeros((), jnp.int32)
        if isinstance(node, Within):
            inner = with_states(carry, interpreter.apply(node.enter, Role.ENTER, key, zero, carry.states))
            after = walk(node.body, inner, key, (*path, 0))
            return with_states(after, interpreter.apply(node.leave, Role.LEAVE, key, zero, carry.states, after.states))
        return interpreter.run(node, carry, key, zero, path)

    carry = walk(program, carry, keys.program_key(key), ())
    return carry.states, history
