"""Run a whole program in one compiled call, and record rows of its outermost loops."""

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, PRNGKeyArray, PyTree

from hyperpush.engines.compiled.interpreter import Carry, Interpreter, Recording, Visit
from hyperpush.engines.result import Recorder
from hyperpush.programs import Profile, Repeat


class LoopRows(NamedTuple):
    """Recorded rows of one loop, in buffers that may have unused rows at the end."""

    records: PyTree
    clocks: PyTree  # clock of each row
    reached: Int[Array, ""]  # number of iterations


class WholeResult(NamedTuple):
    """Result of a whole program. The last three fields are those of `LoopRows`, each by name of the loop."""

    carry: Carry
    finite: Bool[Array, ""]
    records: dict[str, PyTree]
    clocks: dict[str, PyTree]
    reached: dict[str, Int[Array, ""]]


class Recorded(Interpreter):
    """An interpreter that also records rows of outermost loops."""

    recorders: dict[str, Recorder] = eqx.field(default_factory=dict)
    every: int = eqx.field(static=True, default=1)
    rows: dict[str, LoopRows] = eqx.field(default_factory=dict)  # filled during the trace

    def run(self, visit: Visit, carry: Carry) -> Carry:
        node, inside = visit.node, replace(self, recorders={})
        if not isinstance(node, Repeat):
            return super().run(visit, carry)
        if node.name not in self.recorders:
            return inside.loop(visit, carry, 0, node.at_most)[0]
        recorder = self.recorders[node.name]
        recording = Recording(recorder, self.every, rows_of(node, recorder, self.every))
        carry, (records, clocks), reached, _ = inside.loop(visit, carry, 0, node.at_most, recording)
        self.rows[node.name] = LoopRows(records, clocks, reached)
        return carry


def run_whole(
    context: Interpreter, recorders: dict[str, Recorder], every: int, carry: Carry, key: PRNGKeyArray
) -> WholeResult:
    """Run a whole program on one block of clients."""
    known = {field.name: getattr(context, field.name) for field in fields(context)}
    recorded = Recorded(**known, recorders=recorders, every=every)
    after = recorded.run(Visit(context.recipe.program(), key), carry)
    records, clocks, reached = (
        {name: getattr(rows, part) for name, rows in recorded.rows.items()} for part in LoopRows._fields
    )
    return WholeResult(after, all_finite(context, after), records, clocks, reached)


def all_finite(context: Interpreter, carry: Carry) -> Bool[Array, ""]:
    """Return True if all numbers of all clients are finite."""
    leaves = [leaf for leaf in jax.tree.leaves(carry.states) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    leaves = jax.lax.optimization_barrier(leaves)  # else XLA would evaluate constant zeros element by element
    bad = [jnp.any(~jnp.isfinite(leaf.reshape(leaf.shape[0], -1)), axis=1) for leaf in leaves]
    return ~context.placement.any(jnp.any(jnp.stack(bad), axis=0)) if bad else jnp.ones((), bool)


def rows_of(node: Repeat, recorder: Recorder, every: int) -> int:
    """Return the largest number of rows that a recorder can record in a loop."""
    return recorder.count(node.at_most, every)


def outer_loops(profile: Profile, names: Mapping[str, Recorder]) -> dict[str, Repeat] | None:
    """Return the loops called `names`; None unless each name occurs only once, and outside of other loops."""
    found: dict[str, Repeat] = {}
    for _, around, loop in profile.loops:
        if loop.name in names:
            if around or loop.name in found:
                return None
            found[loop.name] = loop
    return found
