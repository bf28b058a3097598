"""The host loop of the compiled engines: it walks the outer nodes of a program, and runs loops in compiled chunks.

Between chunks it checks that all numbers are finite, and calls the hooks of the run. Chunk boundaries never change
results. A run can resume at any node, because the program's profile holds the shapes of the state at each path.
"""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import jax
import numpy as np
from jaxtyping import Array, PRNGKeyArray, PyTree

from hyperpush.base import processes
from hyperpush.base.errors import Diverged, HyperpushError, InvalidInput
from hyperpush.engines.base import Request, ambient
from hyperpush.engines.compiled import chunks
from hyperpush.engines.compiled.chunks import (
    RECORDS_PER_CHUNK,
    ChunkResult,
    ChunkSchedule,
    call_compiled,
    run_chunk,
    run_pass,
)
from hyperpush.engines.compiled.effort import WHOLE
from hyperpush.engines.compiled.interpreter import Carry, Interpreter, Visit, restart_below, with_states
from hyperpush.engines.compiled.snapshots import RecordedRows, Structure, restore, take
from hyperpush.engines.compiled.whole import outer_loops, rows_of, run_whole
from hyperpush.engines.hooks import Cursor, Divergence, Replay, Snapshot, Trail, tell_rows
from hyperpush.engines.result import OUTSIDE, Recorder, RecordFunction, Rows
from hyperpush.engines.run_checks import check_recording
from hyperpush.networks.trees import LONGEST
from hyperpush.programs import (
    Node,
    Path,
    Profile,
    Repeat,
    Role,
    Scope,
    Sequence,
    Server,
    State,
    bytes_of,
    contains,
    leaf_key,
    one_client,
    traced,
    work,
)
from hyperpush.programs.counting import Work

# The host steps through loop bodies with more functions than this, so chunks stay short and progress is visible.
LEAVES_PER_CHUNK = 10_000
SHORT = 2_000  # largest number of function calls in an unrecorded program that runs as a single compiled call
# Largest work (see `HostLoop.weight`) of a single compiled call. It may take minutes; a longer call would show no
# progress and save no checkpoints.
HEAVY = 10**10


class HostLoop:
    """One run of a program: the host walks its nodes and starts compiled chunks."""

    def __init__(self, context: Interpreter, request: Request, profile: Profile, effort: int):
        self.context, self.profile, self.effort, self.recipe = context, profile, effort, request.recipe
        self.recorders, self.every, self.watched = request.recorders, request.every, bool(request.hooks)
        check_recording(self.recorders, self.every, profile)
        self.hooks = (*request.hooks, *ambient().hooks, Divergence())
        self.history = RecordedRows(
            profile, {name: [] for name in self.recorders}, {name: [] for name in self.recorders}
        )
        self.extra = Work()  # clients' work with the answers of servers in plain Python, which the profile lacks
        self.answered: dict[Path, Work] = {}
        self.trail: Trail = ()  # loops that the host is stepping through, with their iterations
        self.held: list[State] = []  # states outside of each enclosing scope
        self.target: Trail = ()  # loops down to the place where the run resumes; (): the place is reached
        self.saved: tuple[Carry, list[State]] | None = None  # carry and states to resume with

    def run(self, carry: Carry, key: PRNGKeyArray) -> Carry:
        """Run the whole program. If it diverges, the error holds the rows recorded so far."""
        try:
            return self.run_program(carry, key)
        except Diverged as error:
            clients = self.context.network.clients
            clocks = self.history.row_clocks(carry.clock, clients, carry.clock.now())
            error.rows = Rows(self.history.result(clients), clocks)
            raise

    def run_program(self, carry: Carry, key: PRNGKeyArray) -> Carry:
        """Run the whole program: a short one as a single compiled call, a longer one node by node."""
        carry = strong(carry)
        self.structure = Structure(self.context, self.profile, carry, self.recorders)
        self.key, self.step, after = key, carry.clock.now(), None
        found = [snapshot for hook in self.hooks if (snapshot := hook.resume_from(self)) is not None]
        if found:
            self.target, self.saved = found[0].trail, restore(self.structure, found[0], self.history)
            self.extra, self.step = Work(found[0].extra), self.saved[0].clock.now()
            after = None if self.target else self.saved[0]
        elif self.is_short():
            after = self.compile_whole(carry, key)
        if after is None:  # the program is long, resumed, or has diverged; then the walk finds where
            after = self.walk(Visit(self.recipe.program(), key), carry)
        for hook in self.hooks:
            hook.keep_result(self, self.snapshot((), after))
        return after

    def is_short(self) -> bool:
        """Return True if a single compiled call can run the program: it ends soon, and no hook observes it."""
        if self.watched or self.profile.has_host_server:
            return False
        leaves = self.profile.leaves
        if not self.recorders and leaves <= SHORT and self.weight(leaves, ()) <= HEAVY:
            return True
        # On lossy links a single call has larger rounding errors: ten times those of separate chunks in TrackedHGP.
        if ambient().hooks or self.effort > WHOLE or self.context.faults is not None:
            return False
        if bytes_of(self.structure.start.states) >= chunks.LARGE:
            return False
        recorded = outer_loops(self.profile, self.recorders)
        return recorded is not None and all(
            rows_of(loop, self.recorders[name], self.every) <= RECORDS_PER_CHUNK for name, loop in recorded.items()
        )

    def compile_whole(self, carry: Carry, key: PRNGKeyArray) -> Carry | None:
        """Run the program in a single compiled call, and return the carry at its end; None if it diverged."""
        result = call_compiled(run_whole, self.context, (dict(self.recorders), self.every), carry, key)
        if not bool(result.finite):
            return None
        after = check_clock(strong(result.carry))
        for name, recorder in self.recorders.items():
            rows = recorder.count(int(result.reached[name]), self.every)
            records = jax.tree.map(lambda buffer, rows=rows: first(buffer, rows), result.records[name])
            clocks = np.asarray(processes.gather(result.clocks[name]))[:rows]
            iterations = [recorder.iteration(row + (not recorder.entry), self.every) for row in range(rows)]
            self.note(name, records, clocks, iterations)
        return after

    def weight(self, leaves: int, path: Path) -> int:
        """Return the work of a pass through the node at `path`: its function calls times the size of all states."""
        numbers = sum([leaf.size for leaf in jax.tree.leaves(self.profile.states[path])])
        return leaves * numbers * self.context.network.clients

    # ------------------------------------------------------------------------- the walk

    def walk(self, visit: Visit, carry: Carry) -> Carry:
        """Run one pass through a node. In a resumed run, skip the part that was complete."""
        node = visit.node
        if isinstance(node, Sequence) and has_loop(node):
            first = self.target[-1][0][len(visit.path)] if self.resumes(visit.path) else 0
            for place in range(first, len(node.nodes)):
                carry = self.walk(visit.child(place), carry)
            return carry
        if isinstance(node, Scope) and has_loop(node):
            return self.enter(visit, carry)
        if isinstance(node, Repeat):
            return self.repeat(visit, carry)
        if is_host_server(node):
            return self.serve(visit, carry)
        after, finite = self.attempt(visit, carry)
        if not finite:
            raise Diverged(OUTSIDE, visit.round, "Check the data and the step sizes.")
        return check_clock(after)

    def resumes(self, path: Path) -> bool:
        """Return True if the place where the run resumes is at this path or below."""
        return bool(self.target) and self.target[-1][0][: len(path)] == path

    def enter(self, visit: Visit, carry: Carry) -> Carry:
        """Run a scope, whose body has its own state."""
        if self.resumes(visit.path) and self.saved is not None:
            self.held.append(self.saved[1][len(self.held)])
        else:
            self.held.append(carry.states)
            carry = restart_below(carry, self.apply(Role.ENTER, visit, carry).states, visit.path)
        after = self.walk(visit.inside(), carry)
        return self.apply(Role.LEAVE, visit, with_states(after, (self.held.pop(), after.states)))

    def attempt(
        self, visit: Visit, carry: Carry, role: Role | None = None, record: RecordFunction | None = None
    ) -> tuple[Carry, bool]:
        """Run a node or one of its functions. Return the new carry, and True if all its numbers are finite."""
        static = (visit.path, (role, record))
        after, finite = call_compiled(run_pass, self.context, static, carry, visit.key, np.int32(visit.round))
        return strong(after), bool(finite)

    def apply(self, role: Role, visit: Visit, carry: Carry, record: RecordFunction | None = None) -> Carry:
        """Run one function of a node, and return the new carry."""
        return self.attempt(visit, carry, role, record)[0]

    def repeat(self, visit: Visit, carry: Carry) -> Carry:
        """Run a loop in compiled chunks, or step by step if the host must run its body."""
        done, resumed = 0, self.resumes(visit.path)
        if resumed and self.saved is not None:
            done = dict(self.target)[visit.path]
            if self.target[-1][0] == visit.path:
                carry, self.target = self.saved[0], ()
        run = self.iterate if self.needs_host(visit.node, visit.path) else self.run_chunks
        return run(visit, carry, done, not resumed)

    def needs_host(self, node: Repeat, path: Path) -> bool:
        """Return True if the host must step through the body of a loop."""
        recorded = contains(node.body, lambda each: isinstance(each, Repeat) and each.name in self.recorders)
        if recorded or contains(node.body, is_host_server):
            if node.agreed:  # only compiled code can run a loop whose length the clients decide
                given = "around a recorded loop or a server in plain Python"
                raise InvalidInput(f"{node.name}: until or times", given, "a fixed number")
            return True
        long = work(node.body) > LEAVES_PER_CHUNK or self.weight(work(node.body), path) > HEAVY
        return not node.agreed and has_loop(node.body) and long

    def iterate(self, visit: Visit, carry: Carry, done: int, fresh: bool) -> Carry:
        """Run a loop whose body the host walks; `fresh` is False for a resumed loop."""
        node, recorder = visit.node, self.recorders.get(visit.node.name)
        if recorder is not None and recorder.entry and fresh:
            self.record(visit, recorder, visit._replace(round=0), carry, 0)
        for i in range(done, node.at_most):
            inside = visit.iteration(i)
            self.trail = (*self.trail, (visit.path, i))
            carry = self.walk(inside, carry)
            self.trail = self.trail[:-1]
            if recorder is not None and recorder.due(i + 1, self.every):
                self.record(visit, recorder, inside._replace(path=visit.path), carry, i + 1)
            self.boundary(visit, i + 1, 1, carry)
        return carry

    def run_chunks(self, visit: Visit, carry: Carry, done: int, fresh: bool) -> Carry:
        """Run a loop in compiled chunks; `fresh` is False for a resumed loop."""
        node, recorder = visit.node, self.recorders.get(visit.node.name)
        schedule = ChunkSchedule.of(node, self.weight(work(node.body), visit.path), self.every, recorder)
        entry, ended = recorder is not None and recorder.entry and fresh, False
        while (done < node.at_most or entry) and not ended:
            stop = schedule.end_of_chunk(done, self.hooks)
            began = time.perf_counter()
            first_row = done // self.every + (not entry)
            result = self.run_chunk(visit, schedule, carry, done, stop, first_row)
            if recorder is not None:
                self.keep_records(visit, result, first_row)
            carry = check_clock(strong(result.carry))
            ended = bool(result.ended) or int(result.reached) < stop or node.at_most == 0
            schedule.adapt(time.perf_counter() - began)
            self.boundary(visit, node.at_most if ended else stop, stop - done, carry)
            done, entry = stop, False
        return carry

    def run_chunk(
        self, visit: Visit, schedule: ChunkSchedule, carry: Carry, start: int, stop: int, first_row: int
    ) -> ChunkResult:
        """Run iterations start…stop−1 in one compiled call."""
        rest, donated = self.split(carry)
        static = (visit.path, schedule.recording())

        def run(stop: int, donated: PyTree = None) -> ChunkResult:
            numbers = (np.int32(visit.round), np.int32(start), np.int32(stop))
            return call_compiled(run_chunk, self.context, static, rest, visit.key, numbers, donated=donated)

        result = run(stop, donated)
        if bool(result.finite):
            return result
        if visit.node.name in self.recorders:
            self.keep_records(visit, result, first_row)

        def walk(i: int) -> None:
            if has_loop(visit.node.body):  # an inner loop may have diverged
                self.hooks = (Divergence(),)
                self.walk(visit.iteration(i), run(i).carry)

        replay = Replay(lambda i: bool(run(i).finite), walk)
        cursor = Cursor((*self.trail, (visit.path, stop)), visit.node.name, stop, visit.node.at_most, stop - start, 0)
        for hook in self.hooks:
            hook.find_divergence(cursor, replay if donated is None else None)
        return result

    def split(self, carry: Carry) -> tuple[Carry, PyTree]:
        """Split a large carry into arrays to keep and arrays that the next chunk may overwrite; None if it is small."""
        if bytes_of(carry.states) < chunks.LARGE:
            return carry, None
        rest, donated = chunks.split_donatable(carry, (self.structure.start, self.held, self.context.data))
        return rest, donated if jax.tree.leaves(donated) else None

    def serve(self, visit: Visit, carry: Carry) -> Carry:
        """Run a server in plain Python."""
        node, path, n = visit.node, visit.path, self.context.network.clients
        message = self.apply(Role.SEND, visit, carry).states
        messages = jax.tree.map(lambda v: first(v, n), processes.gather(message))
        answers = node.compute(messages, leaf_key(processes.gather(visit.key), Role.COMPUTE, 0))
        answered = replace(carry, clock=carry.clock.advance(path)).count_messages(path, 1)
        both = with_states(answered, (carry.states, self.context.place(answers)))
        if path not in self.answered:
            self.answered[path] = traced(node.receive, n, *one_client((self.context.data, *both.states)))[1]
        self.extra.update(self.answered[path])
        return self.apply(Role.RECEIVE, visit, both)

    # ------------------------------------------------------------------------- records and hooks

    def record(self, visit: Visit, recorder: Recorder, when: Visit, carry: Carry, iterations: int) -> None:
        """Record a row of a loop whose body the host walks. `iterations` are complete."""
        made = self.apply(Role.RECORD, when, carry, recorder.f).states
        clock = np.asarray(processes.gather(carry.clock.row()))[None]
        self.note(visit.node.name, jax.tree.map(lambda v: v[None], made), clock, [iterations])

    def keep_records(self, visit: Visit, result: ChunkResult, first_row: int) -> None:
        """Add the rows of a chunk to the history."""
        recorder = self.recorders[visit.node.name]
        rows = range(first_row, recorder.count(int(result.reached), self.every) + (not recorder.entry))
        records = jax.tree.map(lambda buffer: first(buffer, len(rows)), result.records)
        clocks = np.asarray(processes.gather(result.clocks))[: len(rows)]
        self.note(visit.node.name, records, clocks, [recorder.iteration(row, self.every) for row in rows])

    def note(self, name: str, records: PyTree, clocks: np.ndarray, iterations: list[int]) -> None:
        """Add rows to the history of a loop, and pass them to the hooks."""
        self.history.add(name, records, clocks)
        tell_rows(self.hooks, name, iterations, records)

    def boundary(self, visit: Visit, done: int, iterations: int, carry: Carry) -> None:
        """Report the progress between two chunks to the hooks, which may end the run with an error."""
        trail, before, self.step = (*self.trail, (visit.path, done)), self.step, carry.clock.now()
        rounds = max(iterations, self.step - before)
        cursor = Cursor(trail, visit.node.name, done, visit.node.at_most, iterations, rounds)
        snapshot = self.snapshot(trail, carry)
        for hook in self.hooks:
            hook.between_chunks(cursor, snapshot)

    def snapshot(self, trail: Trail, carry: Carry) -> Callable[[], Snapshot | None]:
        """Return a function that returns a snapshot of the run as it is now, even if it is called later."""
        return partial(take, self.structure, trail, carry, list(self.held), self.history.copy(), Counter(self.extra))


def check_clock(carry: Carry) -> Carry:
    """Return the carry; raise HyperpushError if clients disagree about a loop's end or an average did not finish."""
    if bool(carry.clock.stuck):
        raise HyperpushError(
            f"an average along a tree did not reach all clients within {LONGEST:,} rounds: some links are rarely up"
        )
    if bool(carry.clock.split):
        raise HyperpushError(
            "clients disagree about the end of a loop, or a vote did not reach all clients in time. `times`, or "
            "`until` with common=True, may differ between them; programs.decide.decide_at_root lets one decide"
        )
    return carry


def strong(tree: PyTree) -> PyTree:
    """Convert weakly typed arrays to ordinary ones, because a checkpoint cannot store weak types."""
    leaves, structure = jax.tree.flatten(tree)
    weak = [place for place, leaf in enumerate(leaves) if getattr(leaf, "weak_type", False)]
    for place in weak:
        leaves[place] = jax.lax.convert_element_type(leaves[place], leaves[place].dtype)
    return structure.unflatten(leaves) if weak else tree


def first(rows: Array, count: int) -> Array:
    """Return the first `count` rows; the same array if there are no more."""
    return rows if rows.shape[0] == count else rows[:count]


def is_host_server(node: Node) -> bool:
    """Return True if a node is a server in plain Python."""
    return isinstance(node, Server) and node.host


def has_loop(node: Node) -> bool:
    """Return True if a node contains a loop or a server in plain Python, which the host may need to enter."""
    return contains(node, lambda each: isinstance(each, Repeat) or is_host_server(each))
