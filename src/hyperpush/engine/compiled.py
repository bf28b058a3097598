"""The thin host loop of the compiled engines: walk the outside of a program, run its loops in compiled chunks.

Between chunks it reports progress, checks that the numbers are finite, and lets the run's journal keep what has been
reached. Chunk boundaries never change results.
"""

import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, PRNGKeyArray, PyTree

from hyperpush import planning, processes
from hyperpush.checkpoints.journal import Contents, Piece, Trail, current, digest_of
from hyperpush.checks import whole
from hyperpush.counting import Work
from hyperpush.engine import keys, lossy, spent
from hyperpush.engine.faults import Faults
from hyperpush.engine.interpret import Apply, Carry, Clock, Interpreter, composes, restarted, with_states
from hyperpush.engine.placement import Placement, Slice, Whole
from hyperpush.engine.routes import routes
from hyperpush.errors import Diverged, HyperpushError, InvalidInput, unknown
from hyperpush.networks import Network
from hyperpush.program import (
    Average,
    Context,
    Exchange,
    Node,
    Path,
    Repeat,
    Role,
    Sequence,
    Server,
    State,
    Survey,
    Within,
    contains,
    leaf_key,
    survey,
    traced,
    work,
)

Record = Callable[[State, Context], PyTree]
Progress = Callable[[str, int, int], None]  # a loop's name, iterations done, iterations at most

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
OUTSIDE = "program"  # where numbers go wrong outside of loops


@dataclass(frozen=True)
class Outcome:
    """What a run leaves behind."""

    states: PyTree  # every client's state, clients on axis 0
    step: int  # network time after the run: the next run starts here
    rounds: int  # exchanges that took place
    floats: int  # numbers each client sent (a message to several receivers counts once)
    hessian_products: int  # with ∂²_xx f, that each client computed (a server's are nobody's)
    jacobian_products: int  # with ∂²_λx f
    gradients: int  # gradients of f and F
    history: dict[str, PyTree]  # by loop: what its record function returned, leaves [records, clients, …]
    late: int = 0  # messages that missed their round and were dropped (the simulator counts those under way at the end)
    rejected: dict[str, int] = field(default_factory=dict)  # messages refused by peers, by reason
    totals: dict[Path, lossy.Totals] = field(default_factory=dict)  # running sums of the links on a faulty network
    moved: int = 0  # bytes that devices sent to each other, where clients are spread over several

    @property
    def costs(self) -> dict[str, int]:
        """What every result says of its run, by the names of its fields."""
        names = ("step", "rounds", "floats", "hessian_products", "jacobian_products", "gradients")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class Plan:
    """A run, laid out: what every chunk of it needs to know."""

    placement: Placement
    network: Network
    data: PyTree
    key: PRNGKeyArray
    faults: Faults | None
    agreement: int
    batch: int | None

    def interpreter(self) -> Interpreter:
        return Interpreter(
            self.network,
            self.placement,
            self.data,
            keys.network_key(self.key),
            keys.faults_key(self.key),
            self.faults,
            self.agreement,
            self.batch,
        )


def lay_out(
    program: Node, network: Network, states: PyTree, data: PyTree, faults: Faults | None, step: int
) -> tuple[Survey, Carry, int]:
    """What a program does, the first carry, and the rounds that an agreement takes."""
    check_clients("states", states, network.clients)
    check_clients("data", data, network.clients)
    check_repairable(program, faults is not None)

    found = survey(program, one_client(states), one_client(data), network.clients)
    totals = {}
    if faults is not None:
        totals = {
            s.path: lossy.Totals.start(s.message, network.clients, faults.delay)
            for s in found.sendings
            if getattr(s.node, "conserved", False)
        }
    clock = Clock.start((body for body, _, loop in found.loops if loop.agreed), step)
    agrees = any(loop.until is not None for _, _, loop in found.loops)
    return found, Carry(states, clock, totals), network.flood_rounds() if agrees else 1


def one_client(tree: PyTree) -> PyTree:
    """The shapes that one of several stacked clients has."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), tree)


def check_repairable(program: Node, faulty: bool) -> None:
    """Refuse programs that would be silently wrong, or never end, where messages get lost."""

    def fragile(node: Node) -> bool:
        if isinstance(node, Repeat):
            return node.until is not None
        return isinstance(node, Server | Average)

    if faulty and contains(program, fragile):
        raise InvalidInput(
            "faults",
            "links that lose messages",
            "reliable links: averages that start anew (HGP's), servers and votes on ending a loop cannot do without",
        )


def check_recording(recorders: Mapping[str, Record], every: int, program: Node) -> None:
    """Refuse to record a loop that is not there."""
    whole("every", every, least=1)
    names: set[str] = set()
    contains(program, lambda node: isinstance(node, Repeat) and bool(names.add(node.name)))
    for name in recorders:
        if name not in names:
            raise unknown("record", name, names)


def check_clients(name: str, tree: PyTree, clients: int) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        shape = jnp.shape(leaf)
        if not shape or shape[0] != clients:
            raise InvalidInput(f"{name}{jax.tree_util.keystr(path)}", shape, f"{clients} clients on axis 0")


def recorded_rows(interpreter: Interpreter, record: Record, carry: Carry, rows: int) -> PyTree:
    """An empty buffer for `rows` records."""
    shapes = jax.eval_shape(
        lambda: interpreter.apply(record, Role.RECORD, jax.random.key(0), jnp.zeros((), jnp.int32), carry.states)
    )
    return jax.tree.map(lambda s: jnp.zeros((rows, *s.shape), s.dtype), shapes)


def chunk(
    plan: Plan,
    node: Repeat,
    path: Path,
    record: Record | None,
    every: int,
    rows: int,
    carry: Carry,
    key: PRNGKeyArray,
    round: Int[Array, ""],
    start: Int[Array, ""],
    stop: Int[Array, ""],
) -> tuple[Carry, Bool[Array, ""], PyTree, Int[Array, ""], Bool[Array, ""]]:
    """Iterations start…stop−1 of a loop on one block of clients, and whether all clients' numbers are finite then."""
    interpreter = plan.interpreter()
    records = None if record is None else recorded_rows(interpreter, record, carry, rows)
    after, records, reached, ended = interpreter.loop(
        node, carry, key, round, path, start, stop, record, records, every
    )
    return after, finite(plan, after), records, reached, ended


def once(
    plan: Plan, node: Node | Apply, path: Path, carry: Carry, key: PRNGKeyArray, round: Int[Array, ""]
) -> tuple[Carry, Bool[Array, ""]]:
    """One pass through a node on one block of clients, and whether all clients' numbers are finite then."""
    after = plan.interpreter().run(node, carry, key, round, path)
    return after, finite(plan, after)


def finite(plan: Plan, carry: Carry) -> Bool[Array, ""]:
    """Whether all numbers of all clients are finite."""
    leaves = [leaf for leaf in jax.tree.leaves(carry.states) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    bad = [jnp.any(~jnp.isfinite(leaf.reshape(leaf.shape[0], -1)), axis=1) for leaf in leaves]
    return ~plan.placement.any(jnp.any(jnp.stack(bad), axis=0)) if bad else jnp.ones((), bool)


class Unforeseen(Exception):
    """What a server in plain Python answers is known only by asking it."""


def one_device(part: str) -> None:
    """All arrays of a run on one device."""
    return


class Walk:
    """One run of a program by the host.

    A run that goes on where it was cut off first walks on shapes alone (`goal`), past everything that is done, so that
    what was kept finds its structure.
    """

    def __init__(
        self,
        plan: Plan,
        program: Node,
        compiled: Callable[..., Any],
        recorders: Mapping[str, Record],
        every: int,
        progress: Progress | None,
        sharding: Callable[[str], Any] = one_device,
        place: Callable[[PyTree], PyTree] = lambda tree: tree,
    ):
        check_recording(recorders, every, program)
        self.plan = plan
        self.compiled = compiled  # compiled(function, plan, static arguments, carry, key, round, …)
        self.recorders = recorders
        self.every = every
        self.progress = progress
        self.sharding = sharding  # of "states", the "clock" and the "history"
        self.place = place  # puts what the host has computed for all clients where they are
        self.history: dict[str, list[list[Array]]] = {name: [] for name in recorders}  # leaves of records, by chunk
        self.structures: dict[str, Any] = {}  # of the records
        self.answered: dict[Path, Work] = {}  # what a client does with the answer of a server in plain Python
        self.extra = Work()
        self.journal = current()
        self.piece: Piece | None = None
        self.goal: Trail | None = None  # where concrete numbers begin; None: here
        self.trail: Trail = ()  # the loops that the host is in
        self.start: Carry | None = None  # what the run was given: its caller's
        self.held: list[State] = []  # the states outside of each part that has a state of its own
        self.recorded: dict[str, list[Any]] = {}  # shapes of one client's records, of loops passed before the goal
        self.stepped = 0  # network time when rounds were last counted
        self.largest = 0  # bytes of all clients' states before the goal
        self.opaque: int | None = None  # depth of the loop whose state depends on a server in plain Python

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
        after, fine = self.attempt(program, carry, key, 0, ())
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
        if isinstance(node, Within) and has_loop(node):
            inner = self.once(Apply(node.enter, Role.ENTER), carry, key, round, path)
            self.held.append(carry.states)
            begun = self.shaped(lambda carry, states: restarted(carry, states, path), carry, inner.states)
            after = self.walk(node.body, begun, key, round, (*path, 0))
            both = with_states(after, (self.held.pop(), after.states))
            return self.once(Apply(node.leave, Role.LEAVE, 2), both, key, round, path)
        if isinstance(node, Repeat):
            return self.repeat(node, carry, key, round, path)
        if isinstance(node, Server) and node.host:
            return self.serve(node, carry, key, round, path)
        after, fine = self.attempt(node, carry, key, round, path)
        if not fine:
            raise Diverged(OUTSIDE, round, "check the data and the step sizes")
        return after

    def shaped(self, f: Callable[..., Any], *args: PyTree) -> Any:
        """f(*args), on shapes alone before the goal."""
        return f(*args) if self.goal is None else jax.eval_shape(f, *args)

    def attempt(self, node: Any, carry: Carry, key: PRNGKeyArray, round: int, path: Path) -> tuple[Carry, bool]:
        def compute(carry: Carry) -> tuple[Carry, Bool[Array, ""]]:
            return self.compiled(once, self.plan, (node, path), carry, key, np.int32(round))

        after, fine = self.shaped(compute, carry)
        return strong(after), self.goal is not None or bool(fine)

    def once(self, node: Apply, carry: Carry, key: PRNGKeyArray, round: int, path: Path) -> Carry:
        return self.attempt(node, carry, key, round, path)[0]

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
        rows, length, ended = max(node.at_most // self.every, 1), node.at_most, False
        single = node.times is not None  # in one chunk: the number of times is read where the loop starts
        if not single:
            rows, length = min(rows, RECORDS_PER_CHUNK), max(1, min(FIRST_CHUNK, LIGHT // max(weight, 1)))
        began_at = done
        while done < node.at_most and not ended:
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
            args = (self.plan, (node, path, record, self.every, rows), rest, key, np.int32(round))
            with nullcontext() if self.journal is None else self.journal.working():
                after, fine, records, reached, agreed = self.compiled(
                    chunk, *args, np.int32(done), np.int32(stop), spent=free
                )
                if not fine and free is not None:  # where it began is gone
                    raise Diverged(node.name, stop, f"or some rounds before, after {done}; {SMALLER}")
                if not fine:
                    self.explain(node, path, args, done, stop)
            if record is not None:
                count = int(reached) // self.every - done // self.every
                self.note(node, jax.tree.map(lambda rows, k=count: first(rows, k), records))
            carry = self.agreed(strong(after))
            ended = bool(agreed) or int(reached) < stop
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

    def note(self, node: Repeat, records: PyTree) -> None:
        leaves, self.structures[node.name] = jax.tree.flatten(records)
        self.history[node.name].append(leaves)

    # ------------------------------------------------------------ going on

    def approach(self, node: Repeat, carry: Carry, path: Path) -> tuple[Carry, int]:
        """The carry with which a loop begins, and how many of its iterations are done."""
        if self.goal is None:
            return carry, 0
        if record := self.recorders.get(node.name):
            shapes = traced(record, self.plan.network.clients, *one_client((self.plan.data, carry.states)))[0]
            self.recorded[node.name], self.structures[node.name] = jax.tree.flatten(shapes)
        self.largest = max(self.largest, planning.size((carry.states, self.held)))
        depth = len(self.trail)
        if depth >= len(self.goal) or self.goal[depth][0] != path:
            return carry, node.at_most  # it lies behind
        done = self.goal[depth][1]
        return (self.load(carry) if depth + 1 == len(self.goal) else carry), done

    def kept(self, program: Node, carry: Carry, key: PRNGKeyArray) -> Carry | None:
        """The result of a piece that was finished before the run was cut off."""
        if self.piece is None or not self.piece.finished:
            return None
        self.goal = ()
        shapes = jax.eval_shape(lambda: carry)
        try:
            step = self.attempt if self.short(program, shapes.states) else None
            after = step(program, shapes, key, 0, ())[0] if step else self.walk(program, shapes, key, 0)
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
        found = survey(program, one_client(begun.states), one_client(plan.data), n)
        passes = found.passes({body: loop.at_most for body, _, loop in found.loops})
        agreed = {body: passes[body] for body, _, loop in found.loops if loop.agreed}
        for body, _, loop in found.loops:
            if loop.name in self.recorded and not self.history[loop.name]:
                rows = passes[body] // self.every
                shapes = [jax.ShapeDtypeStruct((rows, n, *leaf.shape), leaf.dtype) for leaf in self.recorded[loop.name]]
                self.history[loop.name] = [planning.ones(shapes)]
        sent = [(passes[s.body] * s.messages(plan.agreement), planning.size(s.message)) for s in found.sendings]
        rounds = sum(times for times, _ in sent)
        slices = Slice(n, planner.processes)
        on_routes = Slice(n, planner.processes, routes(plan.network, planner.processes, slices.block))
        spread = replace(plan, placement=on_routes)
        interpreter = Plan(Whole(n), plan.network, plan.data, plan.key, None, plan.agreement, plan.batch).interpreter()
        states, data = max(self.largest, planning.size(after.states)), planning.size(plan.data)

        held = 2 * states + data
        if planner.processes > 1 and plan.faults is None:  # links that lose messages are not spread
            # Besides its own clients' part, a process holds what the experiment made for all and what it is handed.
            handed = states if states <= processes.GATHERED else 0
            held = held * on_routes.block / n + planning.size((begun.states, plan.data)) + handed

        def once_through(carry: Carry) -> Carry:
            return interpreter.run(program, carry, key, jnp.zeros((), jnp.int32))

        longest = max(passes.values())
        planner.pieces.append(
            planning.Piece(
                call=", ".join(dict.fromkeys(loop.name for _, _, loop in found.loops)) or type(program).__name__,
                clients=n,
                parameters=states // max(1, n * jnp.zeros(()).dtype.itemsize),
                rounds=rounds,
                bytes_per_round=sum(times * width for times, width in sent) / max(rounds, 1),
                megabytes_moved=moved_bytes(spread, found, agreed) / 2**20,
                megabytes_per_process=held / 2**20,
                operations=longest * planning.operations(once_through, begun),
            )
        )
        self.goal = None
        clock = planning.ones(jax.eval_shape(lambda: carry.clock))
        step = jnp.asarray(rounds, jnp.int32) + carry.clock.step
        passed = {body: jnp.asarray(times, jnp.int32) for body, times in agreed.items()}
        clock = replace(clock, step=step, passes=passed, late=jnp.zeros((), jnp.int32), split=jnp.zeros((), bool))
        return Carry(planning.ones(after.states), clock, {})

    def contents(self, carry: Carry) -> Contents:
        """All that is needed to go on from here, or with the result."""
        parts = [jax.tree.leaves(carry), jax.tree.leaves(self.held)]
        counts = {}
        for name, rows in self.history.items():
            if rows:
                parts.append([joined(*each) for each in zip(*rows, strict=True)])
                counts[name] = len(parts[-1])
        return Contents([leaf for part in parts for leaf in part], {"history": counts, "extra": dict(self.extra)})

    def load(self, shapes: Carry) -> Carry:
        """The carry that was kept, in place of its shapes; what encloses it and the history, too."""
        assert self.piece is not None
        states, structure = jax.tree.flatten(shapes.states)
        clock, clock_structure = jax.tree.flatten((shapes.clock, shapes.totals))
        held, held_structure = jax.tree.flatten(self.held)
        like = [*states, *clock, *held]
        where = [self.sharding("states")] * len(states) + [self.sharding("clock")] * len(clock)
        where += [self.sharding("states")] * len(held)
        kept = self.piece.shapes()[len(like) :]
        padded = states[0].shape[0] if states else self.plan.network.clients
        for shape, dtype in kept[: sum(self.piece.facts["history"].values())]:
            like.append(jax.ShapeDtypeStruct((shape[0], padded, *shape[2:]), dtype))
            where.append(self.sharding("history"))
        found = iter(self.piece.load(like, where))

        def take(structure: Any, count: int) -> Any:
            return jax.tree.unflatten(structure, [next(found) for _ in range(count)])

        loaded = take(structure, len(states))
        clock, totals = take(clock_structure, len(clock))
        self.held = take(held_structure, len(held))
        for name, count in self.piece.facts["history"].items():
            self.history[name] = [[next(found) for _ in range(count)]]
        self.extra = Work(self.piece.facts["extra"])
        self.goal, self.stepped = None, int(clock.step)
        return Carry(loaded, clock, totals)

    def boundary(self, carry: Carry, path: Path, done: int, iterations: int) -> None:
        """Between two chunks: the run can be cut here."""
        if self.piece is None:
            return
        self.count(carry, iterations)
        if self.opaque is not None and len(self.trail) >= self.opaque:
            self.piece.passed()
            return
        held, history = list(self.held), {name: list(rows) for name, rows in self.history.items()}

        def contents() -> Contents:
            now, self.held, self.history = (self.held, self.history), held, history
            try:
                return self.contents(carry)
            finally:
                self.held, self.history = now

        self.piece.reached((*self.trail, (path, done)), contents)

    def count(self, carry: Carry, iterations: int) -> None:
        """Rounds since the last checkpoint: exchanges, or iterations where nothing is exchanged."""
        if self.journal is not None:
            now = int(carry.clock.step)
            self.journal.rounds += max(iterations, now - self.stepped)
            self.stepped = now

    def advanced(self, node: Repeat, done: int) -> None:
        if self.progress is not None:
            self.progress(node.name, done, node.at_most)
        if self.journal is not None:
            self.journal.show(node.name, done, node.at_most)

    def digest(self, program: Node, carry: Carry) -> str:
        """What tells this piece from another."""
        names: list[str] = []

        def note(node: Node) -> bool:
            names.append(f"{node.name} {node.at_most}" if isinstance(node, Repeat) else type(node).__name__)
            return False

        contains(program, note)
        shapes = [f"{leaf.shape[1:]}{leaf.dtype}" for leaf in jax.tree.leaves((carry.states, self.plan.data))]
        network = self.plan.network
        return digest_of(
            self.plan.data,
            network.clients,
            *(*names, network.name, network.clients, self.every, *sorted(self.recorders), *shapes),
            np.asarray(jax.random.key_data(self.plan.key)).tolist(),
        )

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
        if self.goal is not None and begin == node.at_most > 0 and recorded:
            self.visit(node, carry, key, path, 0)  # to learn how what is recorded inside looks
        for i in range(begin, node.at_most):
            carry = self.visit(node, carry, key, path, i)
            if (record := self.recorders.get(node.name)) and (i + 1) % self.every == 0:
                made = self.once(Apply(record, Role.RECORD), carry, jax.random.fold_in(key, i), i, path).states
                self.note(node, jax.tree.map(lambda v: v[None], made))
            self.advanced(node, i + 1)
            if self.opaque is not None and len(self.trail) < self.opaque:
                self.opaque = None
            self.boundary(carry, path, i + 1, 1)
        return carry

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
        message = self.once(Apply(node.send, Role.SEND), carry, key, round, path).states
        messages = jax.tree.map(lambda v: first(v, self.plan.network.clients), processes.gathered(message))
        answers = node.compute(messages, leaf_key(processes.gathered(key), Role.COMPUTE, 0))
        both = Carry((carry.states, self.place(answers)), carry.clock.advance(), carry.totals)
        if path not in self.answered:
            shapes = one_client((self.plan.data, *both.states))
            self.answered[path] = traced(node.receive, self.plan.network.clients, *shapes)[1]
        self.extra.update(self.answered[path])
        return self.once(Apply(node.receive, Role.RECEIVE, 2), both, key, round, path)

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


def joined(*parts: Array) -> Array:
    """Records one after the other."""
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts)


def numbers(tree: PyTree) -> int:
    """How many numbers there are in the arrays of a pytree."""
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def first(rows: Array, count: int) -> Array:
    """The first rows; where these are all, nothing is computed."""
    return rows if rows.shape[0] == count else rows[:count]


def has_loop(node: Node) -> bool:
    return contains(node, lambda n: isinstance(n, Repeat) or (isinstance(n, Server) and n.host))


def conclude(walk: Walk, carry: Carry, found: Survey, step: int) -> Outcome:
    """Collect a run's results on the host."""
    n = walk.plan.network.clients
    agreed = {body: int(times) for body, times in carry.clock.passes.items()}
    done = found.total(agreed) + walk.extra

    def ours(*parts: Array) -> Array:
        whole = processes.gathered(joined(*parts))
        return whole if whole.shape[1] == n else processes.whole("record", whole)[:, :n]

    moved = moved_bytes(walk.plan, found, agreed)
    if walk.journal is not None:
        walk.journal.moved += moved
    history = {
        name: jax.tree.unflatten(walk.structures[name], [ours(*each) for each in zip(*parts, strict=True)])
        for name, parts in walk.history.items()
        if parts
    }
    return Outcome(
        states=jax.tree.map(
            lambda v: v if v.shape[0] == n else processes.whole("clients", v)[:n], processes.gathered(carry.states)
        ),
        step=int(carry.clock.step),
        rounds=int(carry.clock.step) - step,
        floats=found.floats(agreed, walk.plan.agreement),
        hessian_products=done["hessian_products"],
        jacobian_products=done["jacobian_products"],
        gradients=done["gradients"],
        history=history,
        late=int(carry.clock.late),
        totals=carry.totals,
        moved=moved,
    )


def moved_bytes(plan: Plan, found: Survey, agreed: Mapping[Path, int]) -> int:
    """Bytes that devices send to each other: for each place that sends, rows of a message, times how often."""
    placement = plan.placement
    if isinstance(placement, Whole) or placement.devices == 1:
        return 0
    passes, total = found.passes(agreed), 0
    for place in found.sendings:
        width = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(place.message))
        rows, times, node = placement.rows_out, place.messages(plan.agreement), place.node
        by_receiver = isinstance(node, Exchange) and (
            node.reduce == "stack" or node.weights not in ("push", "gossip", "ones")
        )
        if isinstance(node, Server) or by_receiver:
            rows = (placement.devices - 1) * placement.block  # all see all
        elif isinstance(node, Average) and node.by == "exact":
            rows = placement.devices - 1
        elif isinstance(node, Average) and composes(plan.network, place.floats):
            rows, times = (placement.devices - 1) * placement.block, 1
        total += passes[place.body] * times * rows * width * placement.devices
    return total
