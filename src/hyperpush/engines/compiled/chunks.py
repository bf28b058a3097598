"""Chunks are the compiled parts of a run: some iterations of a loop, or one pass through a node.

This module also decides which arrays of a large state a chunk may overwrite, and the length of chunks.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Int, PRNGKeyArray, PyTree

from hyperpush.base import processes
from hyperpush.engines.compiled import compile
from hyperpush.engines.compiled.interpreter import Carry, Interpreter, Recording, Visit, with_states
from hyperpush.engines.compiled.placement import AXIS
from hyperpush.engines.compiled.whole import WholeResult, all_finite
from hyperpush.engines.hooks import Hook
from hyperpush.engines.result import Recorder, RecordFunction
from hyperpush.programs import Path, Repeat, Role, at, leaf_of

FIRST_CHUNK = 16
LIGHT = 10**8  # number of functions in a loop body times the size of all clients' states: about a second of work
CHUNK_SECONDS = 0.5
RECORDS_PER_CHUNK = 4096
LARGE = 1 << 28  # bytes; states larger than this are overwritten in place, to save memory


Span = tuple[Int[Array, ""], Int[Array, ""], Int[Array, ""]]
Leaf = tuple[Role | None, RecordFunction | None]


class PassResult(NamedTuple):
    """Result of one pass through a node of a program."""

    carry: Carry
    finite: Bool[Array, ""]  # True if all numbers of all clients are finite


class ChunkResult(NamedTuple):
    """Result of one chunk: some iterations of a loop."""

    carry: Carry
    finite: Bool[Array, ""]
    records: PyTree  # recorded rows, in buffers that may be larger
    clocks: PyTree  # clock of each row
    reached: Int[Array, ""]  # number of the next iteration
    ended: Bool[Array, ""]  # True if all clients agreed to end


def run_chunk(
    context: Interpreter, path: Path, recording: Recording | None, carry: Carry, key: PRNGKeyArray, numbers: Span
) -> ChunkResult:
    """Run iterations start…stop−1 of a loop on one block of clients.

    `numbers` holds the iteration of the enclosing loop, then start and stop.
    """
    visit = Visit(at(context.recipe.program(), path), key, numbers[0], path)
    after, recorded, reached, ended = context.loop(visit, carry, *numbers[1:], recording)
    records, clocks = (None, None) if recorded is None else recorded
    return ChunkResult(after, all_finite(context, after), records, clocks, reached, ended)


def run_pass(
    context: Interpreter, path: Path, leaf: Leaf, carry: Carry, key: PRNGKeyArray, round: Int[Array, ""]
) -> PassResult:
    """Run one pass through a node, or one function of the node (`leaf`), on one block of clients.

    The function of a recorder is not part of the program, so `leaf` holds it.
    """
    visit, (role, record) = Visit(at(context.recipe.program(), path), key, round, path), leaf
    if role is None:
        after = context.run(visit, carry)
    else:  # LEAVE and RECEIVE take two arguments: the state, and the result of the scope or exchange
        parts = carry.states if role in (Role.LEAVE, Role.RECEIVE) else (carry.states,)
        f = leaf_of(visit.node, role) if record is None else record
        after = with_states(carry, context.apply(f, role, visit, *parts))
    return PassResult(after, all_finite(context, after))


# Placement on devices of all results except the carry: records have the clients on axis 1.
_OTHERS = {
    ChunkResult: (P(), P(None, AXIS), P(), P(), P()),
    PassResult: (P(),),
    WholeResult: (P(), P(None, AXIS), P(), P()),
}


@dataclass(frozen=True)
class _Handed:
    """Placeholder for an argument that is returned unchanged, which a compiled function would copy."""

    place: int  # position of the argument among the leaves of all arguments


def _call(given: tuple[Any, ...], donated: PyTree) -> Any:
    function, context, static, carry, *scalars = given
    if donated is not None:
        carry = eqx.combine(carry, donated)
    if context.mesh is None:
        places = {id(leaf): place for place, leaf in enumerate(jax.tree.leaves(given)) if eqx.is_array(leaf)}
        result = function(context, *static, carry, *scalars)
        return jax.tree.map(lambda leaf: _Handed(places[id(leaf)]) if id(leaf) in places else leaf, result)
    kind = {run_chunk: ChunkResult, run_pass: PassResult}.get(function, WholeResult)
    arrays, rest = eqx.partition((replace(context, data=None), static), eqx.is_array)

    def block(arrays: Any, data: PyTree, rows: Any, whole: Any, scalars: Any) -> Any:
        (own, static), (states, sent), (clock, totals) = eqx.combine(arrays, rest), rows, whole
        after, *others = function(replace(own, data=data), *static, Carry(states, clock, totals, sent), *scalars)
        return (after.states, after.sent), (after.clock, after.totals), tuple(others)

    (states, sent), (clock, totals), others = jax.shard_map(
        block,
        mesh=context.mesh,
        in_specs=(P(), P(AXIS), P(AXIS), P(), P()),
        out_specs=(P(AXIS), P(), _OTHERS[kind]),
        check_vma=False,
    )(arrays, context.data, (carry.states, carry.sent), (carry.clock, carry.totals), scalars)
    return kind(Carry(states, clock, totals, sent), *others)


def call_compiled(
    function: Callable[..., Any], context: Interpreter, static: tuple[Any, ...], *arguments: Any, donated: PyTree = None
) -> Any:
    """Return function(context, *static, *arguments), compiled. With several devices, each runs its block of clients.

    The first of `arguments` is a carry. Its missing arrays are in `donated` and are overwritten. Arguments that the
    function returns unchanged come back as the same arrays, not copies. A new number in the context's recipe needs no
    recompilation.
    """
    given = (function, context, static, *arguments)
    arrays = jax.tree.leaves(given)
    leaves, structure = jax.tree.flatten(compile.call(_call, given, donated, context.level))
    return structure.unflatten([arrays[leaf.place] if isinstance(leaf, _Handed) else leaf for leaf in leaves])


def split_donatable(tree: PyTree, kept: PyTree) -> tuple[PyTree, PyTree]:
    """Split the arrays of `tree` into those to keep and those that may be overwritten.

    To keep are arrays that share memory with `kept` or with each other. Both results have the structure of `tree`, with
    None where the other result has an array.
    """
    counted = Counter(place for leaf in jax.tree.leaves(tree) for place in _memory(leaf))
    taken = {place for leaf in jax.tree.leaves(kept) for place in _memory(leaf)}

    def free(leaf: Any) -> bool:
        places = _memory(leaf)
        return bool(places) and not any(place in taken or counted[place] > 1 for place in places)

    donatable, rest = eqx.partition(tree, free)
    return rest, donatable


def _memory(leaf: Any) -> list[int]:
    """Return the addresses of an array; empty for other objects and for arrays without elements."""
    if not isinstance(leaf, jax.Array) or leaf.size == 0 or jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return []
    return [shard.data.unsafe_buffer_pointer() for shard in leaf.addressable_shards]


@dataclass
class ChunkSchedule:
    """Rule for the length of the compiled chunks of one loop.

    Chunks begin short and double while they are quick. They become long enough to be cheap to manage, but stay short
    enough to show progress and to save checkpoints. Chunk boundaries never change results.
    """

    node: Repeat
    every: int  # iterations between two recorded rows
    recorder: Recorder | None
    rows: int  # largest number of recorded rows in a chunk, without the row recorded before the first iteration
    length: int  # iterations of the next chunk
    compiling: bool = True  # True if the time of the next chunk includes compilation

    @classmethod
    def of(cls, node: Repeat, weight: int, every: int, recorder: Recorder | None) -> "ChunkSchedule":
        rows = max(0 if recorder is None else recorder.count(node.at_most, every) - recorder.entry, 1)
        if node.times is not None:  # one chunk, because clients compute the number of iterations at the loop's start
            return cls(node, every, recorder, rows, node.at_most)
        length = max(1, min(FIRST_CHUNK, LIGHT // max(weight, 1)))
        return cls(node, every, recorder, min(rows, RECORDS_PER_CHUNK), length, length == FIRST_CHUNK)

    def recording(self) -> Recording | None:
        """Return the recorder of a chunk with the size of its buffer; None without a recorder."""
        return self.recorder and Recording(self.recorder, self.every, self.rows + self.recorder.entry)

    def end_of_chunk(self, done: int, hooks: Iterable[Hook]) -> int:
        """Return the iteration before which the next chunk stops, if `done` iterations are complete."""
        most, every = self.node.at_most, self.every
        stop = min(done + self.length, most)
        if self.node.times is not None:
            return stop
        for hook in hooks:
            stop = hook.end_chunk(done, stop)
        if self.recorder is None:
            return stop
        # The next chunk starts at a multiple of `every`, and the records of this one fit into its rows.
        stop = min(stop, done + self.rows * every)
        return stop if stop == most else min(max(stop // every, done // every + 1) * every, most)

    def adapt(self, seconds: float) -> None:
        """Double the length of chunks if the last one was quick. All processes make the same decision."""
        if processes.agree(seconds < CHUNK_SECONDS or self.compiling, False)[0]:
            self.length *= 2
        self.compiling = False
