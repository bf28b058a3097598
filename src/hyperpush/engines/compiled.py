"""The thin host loop of the compiled engines: walk the outside of a program, run its loops in compiled chunks.

Between chunks it reports progress, checks that the numbers are finite, and lets the run's journal keep what has been
reached. Chunk boundaries never change results.
"""

import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, PRNGKeyArray, PyTree

from hyperpush import processes
from hyperpush.engines import account, planning, spent
from hyperpush.engines.interpret import Apply, Carry, restarted, with_states
from hyperpush.engines.keeping import Position, joined, one_device
from hyperpush.engines.layout import Plan, check_recording, one_client
from hyperpush.engines.result import OUTSIDE, Listener, Progress, Recorder, RecordFunction, RowClock, RunResult
from hyperpush.errors import Diverged, HyperpushError, InvalidInput
from hyperpush.programs import (
    Node,
    Path,
    Profile,
    Repeat,
    Role,
    Scope,
    Sequence,
    Server,
    at,
    contains,
    leaf_key,
    leaf_of,
    traced,
    work,
)
from hyperpush.programs.counting import Work

# A loop body of more leaves than this is entered by the host, so that chunks stay short and progress is seen.
LEAVES_PER_CHUNK = 10_000
FIRST_CHUNK = 16
SHORT = 2_000  # leaves of a program that is compiled as a whole
# Leaves times the numbers of all clients' states: what takes about a second, and what may take minutes. More than that
# is not left to a single call, which could be neither watched nor kept.
LIGHT, HEAVY = 10**8, 10**10
CHUNK_SECONDS = 0.5
RECORDS_PER_CHUNK = 4096
SMALLER = "a smaller step size may help"


def chunk(
    plan: Plan,
    path: Path,
    recorder: Recorder | None,
    every: int,
    rows: int,
    carry: Carry,
    key: PRNGKeyArray,
    round: Int[Array, ""],
    start: Int[Array, ""],
    stop: Int[Array, ""],
) -> tuple[Carry, Bool[Array, ""], PyTree, PyTree, Int[Array, ""], Bool[Array, ""]]:
    """Iterations start…stop−1 of a loop on one block of clients, and whether all clients' numbers are finite then.

    Also what was recorded and when, the next iteration, and whether all have agreed to end.
    """
    interpreter, node = plan.interpreter(), at(plan.recipe.program(), path)
    buffers = None if recorder is None else interpreter.buffers(recorder, carry, rows)
    after, recorded, reached, ended = interpreter.loop(
        node, carry, key, round, path, start, stop, recorder, buffers, every
    )
    records, clocks = (None, None) if recorded is None else recorded
    return after, finite(plan, after), records, clocks, reached, ended


def once(
    plan: Plan,
    path: Path,
    role: Role | None,
    record: RecordFunction | None,
    carry: Carry,
    key: PRNGKeyArray,
    round: Int[Array, ""],
) -> tuple[Carry, Bool[Array, ""]]:
    """One pass on one block of clients, and whether all clients' numbers are finite then.

    Through a node; with a `role`, through that leaf of it alone (a record is no leaf, and is given).
    """
    node = at(plan.recipe.program(), path)
    if role is not None:
        node = Apply(leaf_of(node, role) if record is None else record, role)
    after = plan.interpreter().run(node, carry, key, round, path)
    return after, finite(plan, after)


def finite(plan: Plan, carry: Carry) -> Bool[Array, ""]:
    """Whether all numbers of all clients are finite."""
    leaves = [leaf for leaf in jax.tree.leaves(carry.states) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    bad = [jnp.any(~jnp.isfinite(leaf.reshape(leaf.shape[0], -1)), axis=1) for leaf in leaves]
    return ~plan.placement.any(jnp.any(jnp.stack(bad), axis=0)) if bad else jnp.ones((), bool)


class Unforeseen(Exception):
    """What a server in plain Python answers is known only by asking it."""


class Walk(Position):
    """One run of a program by the host."""

    def __init__(
        self,
        plan: Plan,
        program: Node,
        found: Profile,
        compiled: Callable[..., Any],
        recorders: Mapping[str, Recorder],
        every: int,
        progress: Progress | None,
        sharding: Callable[[str], Any] = one_device,
        place: Callable[[PyTree], PyTree] = lambda tree: tree,
    ):
        check_recording(recorders, every, program)
        super().__init__(plan, recorders, found, every, sharding)
        self.compiled = compiled  # compiled(function, plan, static arguments, carry, key, round, …)
        self.progress = progress
        self.place = place  # puts what the host has computed for all clients where they are
        self.answered: dict[Path, Work] = {}  # what a client does with the answer of a server in plain Python
        self.start: Carry | None = None  # what the run was given: its caller's

    def show(self, loop: str, iterations: list[int], records: PyTree) -> None:
        if isinstance(self.progress, Listener):
            self.progress.rows(loop, iterations, records)

    def run(self, program: Node, carry: Carry, key: PRNGKeyArray) -> Carry:
        """The whole program: a short one compiled as a whole, others walked."""
        carry = self.start = strong(carry)
        if (planner := planning.current()) is not None:
            return self.planned(planner, program, carry, key)
        if self.journal is not None:
            self.piece, self.stepped = self.journal.begin(self.digest(program, carry)), int(carry.clock.step)
        after = self.kept(program, carry, key)
        if after is None:
            after = self.whole(program, carry, key)
        if after is None:  # too long, or it left the finite numbers: walked, it says where
            if self.piece is not None and self.piece.found is not None and not self.piece.finished:
                self.goal, carry = self.piece.trail, jax.eval_shape(lambda: carry)
            after = self.walk(program, carry, key, 0)
        if self.piece is not None:
            self.count(after, 0)
            self.piece.finish(None if self.opaque is not None else self.contents(after))
        return after

    def whole(self, program: Node, carry: Carry, key: PRNGKeyArray) -> Carry | None:
        """A short program's result."""
        if not self.short(program, carry.states):
            return None
        after, fine = self.attempt(carry, key, 0, ())
        return self.agreed(after) if fine else None

    def short(self, program: Node, states: PyTree) -> bool:
        plain = not contains(program, lambda node: isinstance(node, Server) and node.host)
        small = work(program) <= SHORT and work(program) * numbers(states) <= HEAVY
        return plain and not self.recorders and self.progress is None and small

    def walk(self, node: Node, carry: Carry, key: PRNGKeyArray, round: int, path: Path = ()) -> Carry:
        if isinstance(node, Sequence) and has_loop(node):
            for position, child in enumerate(node.nodes):
                carry = self.walk(child, carry, jax.random.fold_in(key, position), round, (*path, position))
            return carry
        if isinstance(node, Scope) and has_loop(node):
            inner = self.once(Role.ENTER, carry, key, round, path)
            self.held.append(carry.states)
            begun = self.shaped(lambda carry, states: restarted(carry, states, path), carry, inner.states)
            after = self.walk(node.body, begun, key, round, (*path, 0))
            both = with_states(after, (self.held.pop(), after.states))
            return self.once(Role.LEAVE, both, key, round, path)
        if isinstance(node, Repeat):
            return self.repeat(node, carry, key, round, path)
        if isinstance(node, Server) and node.host:
            return self.serve(node, carry, key, round, path)
        after, fine = self.attempt(carry, key, round, path)
        if not fine:
            raise Diverged(OUTSIDE, round, "check the data and the step sizes")
        return after

    def attempt(
        self,
        carry: Carry,
        key: PRNGKeyArray,
        round: int,
        path: Path,
        role: Role | None = None,
        record: RecordFunction | None = None,
    ) -> tuple[Carry, bool]:
        """The carry after the node at a path, or after one of its leaves, and whether it is finite."""

        def compute(carry: Carry) -> tuple[Carry, Bool[Array, ""]]:
            return self.compiled(once, self.plan, (path, role, record), carry, key, np.int32(round))

        after, fine = self.shaped(compute, carry)
        return strong(after), self.goal is not None or bool(fine)

    def once(
        self, role: Role, carry: Carry, key: PRNGKeyArray, round: int, path: Path, record: RecordFunction | None = None
    ) -> Carry:
        return self.attempt(carry, key, round, path, role, record)[0]

    def repeat(self, node: Repeat, carry: Carry, key: PRNGKeyArray, round: int, path: Path) -> Carry:
        # Only compiled code can end loops of an agreed length.
        weight = work(node.body) * numbers(carry.states)
        long = work(node.body) > LEAVES_PER_CHUNK or weight > HEAVY
        deep = not node.agreed and has_loop(node.body) and long
        recorded = contains(node.body, lambda n: isinstance(n, Repeat) and n.name in self.recorders)
        if deep or recorded or contains(node.body, lambda n: isinstance(n, Server) and n.host):
            return self.iterate(node, carry, key, round, path, recorded)
        record = self.recorders.get(node.name)
        carry, done = self.approach(node, carry, path)
        entry = record is not None and record.entry and done == 0 and self.goal is None
        rows, length, ended = max(node.at_most // self.every, 1), node.at_most, False
        single = node.times is not None  # in one chunk: the number of times is read where the loop starts
        if not single:
            rows, length = min(rows, RECORDS_PER_CHUNK), max(1, min(FIRST_CHUNK, LIGHT // max(weight, 1)))
        began_at = done
        while (done < node.at_most or entry) and not ended:
            stop = min(done + length, node.at_most)
            if self.piece is not None and not single:
                stop = self.piece.room(stop, done)
            if (
                record is not None and not single
            ):  # start every chunk on a whole number of records, and keep within the buffer
                stop = min(stop, done + rows * self.every)
                stop = stop if stop == node.at_most else max(stop // self.every, done // self.every + 1) * self.every
                stop = min(stop, node.at_most)
            began = time.perf_counter()
            rest, free = self.divided(carry)
            room = rows + (record is not None and record.entry)
            args = (self.plan, (path, record, self.every, room), rest, key, np.int32(round))
            with nullcontext() if self.journal is None else self.journal.working():
                after, fine, records, clocks, reached, agreed = self.compiled(
                    chunk, *args, np.int32(done), np.int32(stop), spent=free
                )
                if not fine and free is not None:  # where it began is gone
                    raise Diverged(node.name, stop, f"or some rounds before, after {done}; {SMALLER}")
                if not fine:
                    self.explain(node, path, args, done, stop)
            if record is not None:
                made = range(done // self.every + (not entry), int(reached) // self.every + 1)
                count = len(made)
                records = jax.tree.map(lambda rows, k=count: first(rows, k), records)
                clocks = np.asarray(processes.gathered(clocks))[:count]
                self.note(node, path, records, clocks, (row * self.every for row in made))
            carry = self.agreed(strong(after))
            ended, entry = bool(agreed) or int(reached) < stop or node.at_most == 0, False
            # The first chunk pays for compilation: grow from there until a chunk is long enough to be cheap to manage.
            quick = time.perf_counter() - began < CHUNK_SECONDS or (done == began_at and length == FIRST_CHUNK)
            if processes.agree(quick, False)[0]:
                length *= 2
            before, done = done, stop
            self.advanced(node, node.at_most if ended else done)
            if not ended and done < node.at_most:
                self.boundary(carry, path, done, done - before)
            else:
                self.count(carry, done - before)  # what follows the loop is kept with it
        return carry

    def divided(self, carry: Carry) -> tuple[Carry, PyTree]:
        """A large carry in two parts: what has to stay, and what the next chunk may overwrite; None if it is small."""
        if planning.size(carry.states) < spent.LARGE:
            return carry, None
        if self.journal is not None:
            self.journal.latest = None  # what was not written by now cannot be any more
        rest, free = spent.parted(carry, (self.start, self.held, self.plan.data))
        return rest, free if jax.tree.leaves(free) else None

    def kept(self, program: Node, carry: Carry, key: PRNGKeyArray) -> Carry | None:
        """The result of a piece that was finished before the run was cut off."""
        if self.piece is None or not self.piece.finished:
            return None
        self.goal = ()
        shapes = jax.eval_shape(lambda: carry)
        try:
            step = self.attempt if self.short(program, shapes.states) else None
            after = step(shapes, key, 0, ())[0] if step else self.walk(program, shapes, key, 0)
            return self.load(after)
        except Unforeseen:
            self.goal, self.trail, self.held, self.opaque = None, (), [], None
            self.piece.finished, self.piece.found = False, None
            return None

    def planned(self, planner: planning.Planner, program: Node, carry: Carry, key: PRNGKeyArray) -> Carry:
        """Ones in the shapes of the result; the planner learns what it would have taken."""
        plan, n = self.plan, self.plan.network.clients
        self.goal, self.held, begun = (), [], jax.eval_shape(lambda: carry)
        try:
            after = self.walk(program, begun, key, 0)
        except Unforeseen:  # a server in plain Python: most return what they got
            after = begun
        found = self.found
        passes, agreed = account.at_most(found)
        for body, around, loop in found.loops:
            if loop.name in self.recorded:
                rows = passes[around] * (loop.at_most // self.every + self.recorders[loop.name].entry)
                shapes = [jax.ShapeDtypeStruct((rows, n, *leaf.shape), leaf.dtype) for leaf in self.recorded[loop.name]]
                self.history[loop.name].append(planning.ones(shapes))
                unknown = np.zeros((rows, 4 + len(agreed)), np.int32)
                unknown[:, :2] = self.loops[body[:-1]], 1
                self.clocks[loop.name].append(unknown)
        largest = max(self.largest, planning.size(after.states))
        piece = account.foreseen(plan, program, found, begun, largest, key, planner.processes)
        planner.pieces.append(piece)
        self.goal = None
        clock = planning.ones(jax.eval_shape(lambda: carry.clock))
        step = jnp.asarray(piece.rounds, jnp.int32) + carry.clock.step
        passed = {body: jnp.asarray(times, jnp.int32) for body, times in agreed.items()}
        clock = replace(clock, step=step, passes=passed, late=jnp.zeros((), jnp.int32), split=jnp.zeros((), bool))
        return Carry(planning.ones(after.states), clock, {}, carry.sent)

    def advanced(self, node: Repeat, done: int) -> None:
        if self.progress is not None:
            self.progress(node.name, done, node.at_most)
        if self.journal is not None:
            self.journal.show(node.name, done, node.at_most)

    def explain(self, node: Repeat, path: Path, args: tuple[Any, ...], start: int, bad: int) -> NoReturn:
        """Find the first round after which the numbers were not finite, by replaying parts of the chunk, and raise."""
        self.piece = None
        good, before = start, args[2]
        while bad - good > 1:
            middle = (good + bad) // 2
            after, fine, *_ = self.compiled(chunk, *args, np.int32(start), np.int32(middle))
            good, bad, before = (middle, bad, after) if fine else (good, middle, before)
        if has_loop(node.body):  # a loop inside may be to blame: walk this one round and let that loop say so
            try:
                self.walk(node.body, before, jax.random.fold_in(args[3], good), good, (*path, 0))
            except Diverged as inside:
                if inside.where != OUTSIDE:
                    raise
        raise Diverged(node.name, bad, SMALLER)

    def iterate(
        self, node: Repeat, carry: Carry, key: PRNGKeyArray, round: int, path: Path, recorded: bool = False
    ) -> Carry:
        """A loop whose body the host walks itself."""
        if node.agreed:
            raise InvalidInput(
                f"{node.name}: until or times", "around a recorded loop or a server in plain Python", "a fixed number"
            )
        carry, begin = self.approach(node, carry, path)
        record = self.recorders.get(node.name)
        if record is not None and record.entry and begin == 0 and self.goal is None:
            self.record(node, record, carry, key, path, 0)
        if self.goal is not None and begin == node.at_most > 0 and recorded:
            self.visit(node, carry, key, path, 0)  # to learn how what is recorded inside looks
        for i in range(begin, node.at_most):
            carry = self.visit(node, carry, key, path, i)
            if record is not None and (i + 1) % self.every == 0:
                self.record(node, record, carry, jax.random.fold_in(key, i), path, i + 1)
            self.advanced(node, i + 1)
            if self.opaque is not None and len(self.trail) < self.opaque:
                self.opaque = None
            self.boundary(carry, path, i + 1, 1)
        return carry

    def record(
        self, node: Repeat, recorder: Recorder, carry: Carry, key: PRNGKeyArray, path: Path, iterations: int
    ) -> None:
        """A row of a loop whose body the host walks, after so many iterations."""
        made = self.once(Role.RECORD, carry, key, max(iterations - 1, 0), path, recorder.f).states
        clock = np.array([[int(each) for each in jax.tree.leaves((carry.clock.step, carry.clock.passes))]], np.int32)
        self.note(node, path, jax.tree.map(lambda v: v[None], made), clock, (iterations,))

    def visit(self, node: Repeat, carry: Carry, key: PRNGKeyArray, path: Path, i: int) -> Carry:
        """One pass through a loop's body."""
        self.trail = (*self.trail, (path, i))
        carry = self.walk(node.body, carry, jax.random.fold_in(key, i), i, (*path, 0))
        self.trail = self.trail[:-1]
        return carry

    def serve(self, node: Server, carry: Carry, key: PRNGKeyArray, round: int, path: Path) -> Carry:
        """A server's work in plain Python."""
        if self.goal is not None:
            raise Unforeseen
        self.opaque = len(self.trail)
        message = self.once(Role.SEND, carry, key, round, path).states
        messages = jax.tree.map(lambda v: first(v, self.plan.network.clients), processes.gathered(message))
        answers = node.compute(messages, leaf_key(processes.gathered(key), Role.COMPUTE, 0))
        answered = replace(carry, clock=carry.clock.advance()).sending(path, 1)
        both = with_states(answered, (carry.states, self.place(answers)))
        if path not in self.answered:
            shapes = one_client((self.plan.data, *both.states))
            self.answered[path] = traced(node.receive, self.plan.network.clients, *shapes)[1]
        self.extra.update(self.answered[path])
        return self.once(Role.RECEIVE, both, key, round, path)

    def agreed(self, carry: Carry) -> Carry:
        if bool(carry.clock.split):
            raise HyperpushError("clients disagree about the end of a loop: the network did not reach everyone in time")
        return carry


def strong(tree: PyTree) -> PyTree:
    """The same arrays without weak types, which a checkpoint cannot hold."""

    def one(leaf: Any) -> Any:
        if not getattr(leaf, "weak_type", False):
            return leaf
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        return jax.lax.convert_element_type(leaf, leaf.dtype)

    return jax.tree.map(one, tree)


def numbers(tree: PyTree) -> int:
    """How many numbers there are in the arrays of a pytree."""
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def first(rows: Array, count: int) -> Array:
    """The first rows; where these are all, nothing is computed."""
    return rows if rows.shape[0] == count else rows[:count]


def has_loop(node: Node) -> bool:
    return contains(node, lambda n: isinstance(n, Repeat) or (isinstance(n, Server) and n.host))


def conclude(walk: Walk, carry: Carry, step: int) -> RunResult:
    """Collect a run's results on the host."""
    n, found = walk.plan.network.clients, walk.found
    agreed = {body: int(times) for body, times in carry.clock.passes.items()}
    done = found.total(agreed) + walk.extra

    def ours(*parts: Array) -> Array:
        whole = processes.gathered(joined(*parts))
        return whole if whole.shape[1] == n else processes.whole("record", whole)[:, :n]

    moved = account.moved_bytes(walk.plan, found, agreed)
    if walk.journal is not None:
        walk.journal.moved += moved
    history = {
        name: jax.tree.unflatten(walk.structures[name], [ours(*each) for each in zip(*parts, strict=True)])
        for name, parts in walk.history.items()
        if parts
    }
    return RunResult(
        states=jax.tree.map(
            lambda v: v if v.shape[0] == n else processes.whole("clients", v)[:n], processes.gathered(carry.states)
        ),
        step=int(carry.clock.step),
        rounds=int(carry.clock.step) - step,
        floats=found.floats(agreed, walk.plan.agreement),
        work=done,
        history=history,
        late=int(carry.clock.late),
        totals=carry.totals,
        clocks={name: row_clock(walk, np.concatenate(rows), step) for name, rows in walk.clocks.items() if rows},
        bytes=sent_bytes(walk, carry),
        moved=moved,
    )


def row_clock(walk: Walk, rows: np.ndarray, started: int) -> RowClock:
    """When records were made, from what was noted beside them."""
    found, agreement = walk.found, walk.plan.agreement
    loops, entered, iterations, step, *passes = rows.astype(np.int64).T
    agreed = dict(zip(sorted(body for body, _, loop in found.loops if loop.agreed), passes, strict=True))
    floats = np.zeros_like(step)
    for number in np.unique(loops):  # several loops may have the same name
        here = loops == number
        until_then = {body: count[here] for body, count in agreed.items()}
        body = found.loops[number][0]
        floats[here] = found.floats_at(body, iterations[here], until_then, agreement, entered[here])
    return RowClock(step, floats, agreed, started)


def sent_bytes(walk: Walk, carry: Carry) -> np.ndarray:
    """Bytes that each client has sent."""
    n, width = walk.plan.network.clients, {sending.path: sending.bytes for sending in walk.found.sendings}
    counts = processes.gathered(carry.sent)
    total = np.zeros(n, np.int64)
    for path, count in counts.items():
        total += width[path] * np.asarray(count)[:n].astype(np.int64)
    return total
