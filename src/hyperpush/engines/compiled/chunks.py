"""What is compiled of a run: some iterations of a loop, or one pass through a node.

Also which arrays of a large state a chunk may overwrite, and how long chunks are.
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
from hyperpush.engines.result import Recorder, RecordFunction
from hyperpush.engines.run_hooks import RunHook
from hyperpush.programs import Path, Repeat, Role, at, leaf_of

FIRST_CHUNK = 16
LIGHT = 10**8  # leaves times the numbers of all clients' states: what takes about a second
CHUNK_SECONDS = 0.5
RECORDS_PER_CHUNK = 4096
LARGE = 1 << 28  # bytes of all states from which on it is worth it to overwrite them


Span = tuple[Int[Array, ""], Int[Array, ""], Int[Array, ""]]
Leaf = tuple[Role | None, RecordFunction | None]


class PassResult(NamedTuple):
    """What comes of one pass."""

    carry: Carry
    finite: Bool[Array, ""]  # whether all numbers of all clients are


class ChunkResult(NamedTuple):
    """What comes of some iterations of a loop."""

    carry: Carry
    finite: Bool[Array, ""]
    records: PyTree  # rows that were recorded, in buffers that may have room for more
    clocks: PyTree  # when each was
    reached: Int[Array, ""]  # the next iteration
    ended: Bool[Array, ""]  # whether all have agreed to end


def run_chunk(
    context: Interpreter, path: Path, recording: Recording | None, carry: Carry, key: PRNGKeyArray, numbers: Span
) -> ChunkResult:
    """Iterations start…stop−1 of a loop on one block of clients; `numbers` are the round around it, start and stop."""
    visit = Visit(at(context.recipe.program(), path), key, numbers[0], path)
    after, recorded, reached, ended = context.loop(visit, carry, *numbers[1:], recording)
    records, clocks = (None, None) if recorded is None else recorded
    return ChunkResult(after, all_finite(context, after), records, clocks, reached, ended)


def run_pass(
    context: Interpreter, path: Path, leaf: Leaf, carry: Carry, key: PRNGKeyArray, round: Int[Array, ""]
) -> PassResult:
    """One pass through a node on one block of clients; with a `leaf`, through that one of it alone.

    A record is no leaf of a program, and its function is given.
    """
    visit, (role, record) = Visit(at(context.recipe.program(), path), key, round, path), leaf
    if role is None:
        after = context.run(visit, carry)
    else:  # these two get what came of another node besides the state
        parts = carry.states if role in (Role.LEAVE, Role.RECEIVE) else (carry.states,)
        f = leaf_of(visit.node, role) if record is None else record
        after = with_states(carry, context.apply(f, role, visit, *parts))
    return PassResult(after, all_finite(context, after))


# Where what comes besides the carry is: records have the clients on axis 1.
_OTHERS = {
    ChunkResult: (P(), P(None, AXIS), P(), P(), P()),
    PassResult: (P(),),
    WholeResult: (P(), P(None, AXIS), P(), P()),
}


@dataclass(frozen=True)
class _Handed:
    """Stands for an argument that comes out as it went in: a compiled function would copy it."""

    place: int  # among the leaves of what was given


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
    """function(context, *static, *arguments), compiled; block by block where there are several devices.

    The first argument is a carry. What it lacks is in `donated`, and is overwritten. What comes out as it went in is
    the same array, not a copy. A new number in the context's recipe compiles nothing.
    """
    given = (function, context, static, *arguments)
    arrays = jax.tree.leaves(given)
    leaves, structure = jax.tree.flatten(compile.call(_call, given, donated, context.level))
    return structure.unflatten([arrays[leaf.place] if isinstance(leaf, _Handed) else leaf for leaf in leaves])


def split_donatable(tree: PyTree, kept: PyTree) -> tuple[PyTree, PyTree]:
    """The arrays that may not be overwritten, as `kept` or others here share their memory; and those that may.

    Both have the structure of `tree`, with None in place of what is in the other.
    """
    counted = Counter(place for leaf in jax.tree.leaves(tree) for place in _memory(leaf))
    taken = {place for leaf in jax.tree.leaves(kept) for place in _memory(leaf)}

    def free(leaf: Any) -> bool:
        places = _memory(leaf)
        return bool(places) and not any(place in taken or counted[place] > 1 for place in places)

    donatable, rest = eqx.partition(tree, free)
    return rest, donatable


def _memory(leaf: Any) -> list[int]:
    """Where an array lies; nothing for what is not an array or has no elements."""
    if not isinstance(leaf, jax.Array) or leaf.size == 0 or jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return []
    return [shard.data.unsafe_buffer_pointer() for shard in leaf.addressable_shards]


@dataclass
class ChunkSchedule:
    """How far the next compiled chunk of a loop goes.

    Chunks begin short and double while they are quick: long enough to be cheap to manage, short enough to show
    progress and to save checkpoints. Where a chunk ends never changes results.
    """

    node: Repeat
    every: int  # iterations between two records
    recorder: Recorder | None
    rows: int  # records that one chunk has room for, besides that of the entry
    length: int  # iterations of the next chunk
    compiling: bool = True  # the next chunk pays for compilation

    @classmethod
    def of(cls, node: Repeat, weight: int, every: int, recorder: Recorder | None) -> "ChunkSchedule":
        rows = max(0 if recorder is None else recorder.count(node.at_most, every) - recorder.entry, 1)
        if node.times is not None:  # in one chunk: the number of times is read where the loop starts
            return cls(node, every, recorder, rows, node.at_most)
        length = max(1, min(FIRST_CHUNK, LIGHT // max(weight, 1)))
        return cls(node, every, recorder, min(rows, RECORDS_PER_CHUNK), length, length == FIRST_CHUNK)

    def recording(self) -> Recording | None:
        """What a chunk records."""
        return self.recorder and Recording(self.recorder, self.every, self.rows + self.recorder.entry)

    def end_of_chunk(self, done: int, hooks: Iterable[RunHook]) -> int:
        """The iteration before which the next chunk stops."""
        most, every = self.node.at_most, self.every
        stop = min(done + self.length, most)
        if self.node.times is not None:
            return stop
        for hook in hooks:
            stop = hook.room(done, stop)
        if self.recorder is None:
            return stop
        # The next chunk starts on a whole number of records, and this one's fit into its rows.
        stop = min(stop, done + self.rows * every)
        return stop if stop == most else min(max(stop // every, done // every + 1) * every, most)

    def adapt(self, seconds: float) -> None:
        """Grow until a chunk is long enough to be cheap to manage. Processes decide alike."""
        if processes.agree(seconds < CHUNK_SECONDS or self.compiling, False)[0]:
            self.length *= 2
        self.compiling = False
