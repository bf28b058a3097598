"""The thin host loop of the compiled engines: walk the outside of a program, run its loops in compiled chunks.

Between chunks it reports progress and checks that the numbers are finite. Chunk boundaries never change results.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, PRNGKeyArray, PyTree

from hyperpush.checks import whole
from hyperpush.counting import Work
from hyperpush.engine import keys, lossy
from hyperpush.engine.faults import Faults
from hyperpush.engine.interpret import Apply, Carry, Clock, Interpreter, restarted, with_states
from hyperpush.engine.placement import Placement
from hyperpush.errors import Diverged, HyperpushError, InvalidInput, unknown
from hyperpush.networks import Network
from hyperpush.program import (
    Average,
    Context,
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
CHUNK_SECONDS = 0.5
RECORDS_PER_CHUNK = 4096
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


class Walk:
    """One run of a program by the host."""

    def __init__(
        self,
        plan: Plan,
        program: Node,
        compiled: Callable[..., Any],
        recorders: Mapping[str, Record],
        every: int,
        progress: Progress | None,
    ):
        check_recording(recorders, every, program)
        self.plan = plan
        self.compiled = compiled  # compiled(function, plan, static arguments, carry, key, round, …)
        self.recorders = recorders
        self.every = every
        self.progress = progress
        self.history: dict[str, list[PyTree]] = {name: [] for name in recorders}
        self.answered: dict[Path, Work] = {}  # what a client does with the answer of a server in plain Python
        self.extra = Work()

    def run(self, program: Node, carry: Carry, key: PRNGKeyArray) -> Carry:
        """The whole program: a short one compiled as a whole, others walked."""
        plain = not contains(program, lambda node: isinstance(node, Server) and node.host)
        if plain and not self.recorders and self.progress is None and work(program) <= SHORT:
            after, fine = self.attempt(program, carry, key, 0, ())
            if fine:
                return self.agreed(after)
            # Walked again, it says where.
        return self.walk(program, carry, key, 0)

    def walk(self, node: Node, carry: Carry, key: PRNGKeyArray, round: int, path: Path = ()) -> Carry:
        if isinstance(node, Sequence) and has_loop(node):
            for position, child in enumerate(node.nodes):
                carry = self.walk(child, carry, jax.random.fold_in(key, position), round, (*path, position))
            return carry
        if isinstance(node, Within) and has_loop(node):
            inner = self.once(Apply(node.enter, Role.ENTER), carry, key, round, path)
            after = self.walk(node.body, restarted(carry, inner.states, path), key, round, (*path, 0))
            both = with_states(after, (carry.states, after.states))
            return self.once(Apply(node.leave, Role.LEAVE, 2), both, key, round, path)
        if isinstance(node, Repeat):
            return self.repeat(node, carry, key, round, path)
        if isinstance(node, Server) and node.host:
            return self.serve(node, carry, key, round, path)
        after, fine = self.attempt(node, carry, key, round, path)
        if not fine:
            raise Diverged(OUTSIDE, round, "check the data and the step sizes")
        return after

    def attempt(self, node: Any, carry: Carry, key: PRNGKeyArray, round: int, path: Path) -> tuple[Carry, bool]:
        after, fine = self.compiled(once, self.plan, (node, path), carry, key, np.int32(round))
        return after, bool(fine)

    def once(self, node: Apply, carry: Carry, key: PRNGKeyArray, round: int, path: Path) -> Carry:
        return self.attempt(node, carry, key, round, path)[0]

    def repeat(self, node: Repeat, carry: Carry, key: PRNGKeyArray, round: int, path: Path) -> Carry:
        # Only compiled code can end loops of an agreed length.
        deep = not node.agreed and has_loop(node.body) and work(node.body) > LEAVES_PER_CHUNK
        recorded = contains(node.body, lambda n: isinstance(n, Repeat) and n.name in self.recorders)
        if deep or recorded or contains(node.body, lambda n: isinstance(n, Server) and n.host):
            return self.iterate(node, carry, key, round, path)
        record = self.recorders.get(node.name)
        rows, done, length, ended = max(node.at_most // self.every, 1), 0, node.at_most, False
        single = node.times is not None  # in one chunk: the number of times is read where the loop starts
        if not single:
            rows, length = min(rows, RECORDS_PER_CHUNK), FIRST_CHUNK
        while done < node.at_most and not ended:
            stop = min(done + length, node.at_most)
            if (
                record is not None and not single
            ):  # start every chunk on a whole number of records, and keep within the buffer
                stop = min(stop, done + rows * self.every)
                stop = stop if stop == node.at_most else max(stop // self.every, done // self.every + 1) * self.every
                stop = min(stop, node.at_most)
            began = time.perf_counter()
            args = (self.plan, (node, path, record, self.every, rows), carry, key, np.int32(round))
            after, fine, records, reached, agreed = self.compiled(chunk, *args, np.int32(done), np.int32(stop))
            if not fine:
                self.explain(node, path, args, done, stop)
            if record is not None:
                count = int(reached) // self.every - done // self.every
                self.history[node.name].append(jax.tree.map(lambda rows, k=count: first(rows, k), records))
            carry = self.agreed(after)
            ended = bool(agreed) or int(reached) < stop
            # The first chunk pays for compilation: grow from there until a chunk is long enough to be cheap to manage.
            if time.perf_counter() - began < CHUNK_SECONDS or done == 0:
                length *= 2
            done = stop
            if self.progress is not None:
                self.progress(node.name, node.at_most if ended else done, node.at_most)
        return carry

    def explain(self, node: Repeat, path: Path, args: tuple[Any, ...], start: int, bad: int) -> NoReturn:
        """Find the first round after which the numbers were not finite, by replaying parts of the chunk, and raise."""
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
        raise Diverged(node.name, bad, "a smaller step size may help")

    def iterate(self, node: Repeat, carry: Carry, key: PRNGKeyArray, round: int, path: Path) -> Carry:
        """A loop whose body the host walks itself."""
        if node.agreed:
            raise InvalidInput(
                f"{node.name}: until or times", "around a recorded loop or a server in plain Python", "a fixed number"
            )
        for i in range(node.at_most):
            carry = self.walk(node.body, carry, jax.random.fold_in(key, i), i, (*path, 0))
            if (record := self.recorders.get(node.name)) and (i + 1) % self.every == 0:
                recorded = self.once(Apply(record, Role.RECORD), carry, jax.random.fold_in(key, i), i, path).states
                self.history[node.name].append(jax.tree.map(lambda v: v[None], recorded))
            if self.progress is not None:
                self.progress(node.name, i + 1, node.at_most)
        return carry

    def serve(self, node: Server, carry: Carry, key: PRNGKeyArray, round: int, path: Path) -> Carry:
        """A server's work in plain Python."""
        message = self.once(Apply(node.send, Role.SEND), carry, key, round, path).states
        gathered = jax.tree.map(lambda v: first(v, self.plan.network.clients), message)
        answers = node.compute(gathered, leaf_key(key, Role.COMPUTE, 0))
        both = Carry((carry.states, pad_clients(answers, message)), carry.clock.advance(), carry.totals)
        if path not in self.answered:
            shapes = one_client((self.plan.data, *both.states))
            self.answered[path] = traced(node.receive, self.plan.network.clients, *shapes)[1]
        self.extra.update(self.answered[path])
        return self.once(Apply(node.receive, Role.RECEIVE, 2), both, key, round, path)

    def agreed(self, carry: Carry) -> Carry:
        if bool(carry.clock.split):
            raise HyperpushError("clients disagree about the end of a loop: the network did not reach everyone in time")
        return carry


def first(rows: Array, count: int) -> Array:
    """The first rows; where these are all, nothing is computed."""
    return rows if rows.shape[0] == count else rows[:count]


def has_loop(node: Node) -> bool:
    return contains(node, lambda n: isinstance(n, Repeat) or (isinstance(n, Server) and n.host))


def pad_clients(tree: PyTree, like: PyTree) -> PyTree:
    """Repeat the last client until there are as many as in `like`."""
    rows = jax.tree.leaves(like)[0].shape[0]
    return jax.tree.map(lambda v: jnp.concatenate([v, jnp.repeat(v[-1:], rows - v.shape[0], axis=0)]), tree)


def conclude(walk: Walk, carry: Carry, found: Survey, step: int) -> Outcome:
    """Collect a run's results on the host."""
    n = walk.plan.network.clients
    agreed = {body: int(times) for body, times in carry.clock.passes.items()}
    done = found.total(agreed) + walk.extra

    def joined(*parts: Array) -> Array:
        whole = parts[0] if len(parts) == 1 else jnp.concatenate(parts)
        return whole if whole.shape[1] == n else whole[:, :n]

    history = {name: jax.tree.map(joined, *parts) for name, parts in walk.history.items() if parts}
    return Outcome(
        states=jax.tree.map(lambda v: first(v, n), carry.states),
        step=int(carry.clock.step),
        rounds=int(carry.clock.step) - step,
        floats=found.floats(agreed, walk.plan.agreement),
        hessian_products=done["hessian_products"],
        jacobian_products=done["jacobian_products"],
        gradients=done["gradients"],
        history=history,
        late=int(carry.clock.late),
        totals=carry.totals,
    )
