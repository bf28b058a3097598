"""The thin host loop of the compiled engines: walk the outside of a program, run its loops in compiled chunks.

Between chunks it reports progress and checks that the numbers are finite. Chunk boundaries never change results.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, PRNGKeyArray, PyTree

from hyperpush.checks import whole
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
    Sending,
    Sequence,
    Server,
    State,
    Within,
    contains,
    leaf_key,
    sendings,
    work,
)

Record = Callable[[State, Context], PyTree]
Progress = Callable[[str, int, int], None]  # a loop's name, iterations done, iterations at most

# A loop body of more leaves than this is entered by the host, so that chunks stay short and progress is seen.
LEAVES_PER_CHUNK = 10_000
FIRST_CHUNK = 16
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
    history: dict[str, PyTree]  # by loop: what its record function returned, leaves [records, clients, …]
    late: int = 0  # messages that missed their round and were dropped (the simulator counts those under way at the end)
    rejected: dict[str, int] = field(default_factory=dict)  # messages refused by peers, by reason
    totals: dict[Path, lossy.Totals] = field(default_factory=dict)  # running sums of the links on a faulty network


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
) -> tuple[list[Sending], Carry, int]:
    """A program's sendings, the first carry, and the rounds that an agreement takes."""
    check_clients("states", states, network.clients)
    check_clients("data", data, network.clients)
    check_repairable(program, faults is not None)

    def one(tree):
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), tree)

    sends = sendings(program, one(states), one(data), network.clients)
    totals = {}
    if faults is not None:
        totals = {
            s.path: lossy.Totals.start(s.message, network.clients, faults.delay)
            for s in sends
            if getattr(s.node, "conserved", False)
        }
    agrees = contains(program, lambda node: isinstance(node, Repeat) and node.until is not None)
    return sends, Carry(states, Clock.start(sends, step), totals), network.flood_rounds() if agrees else 1


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
) -> tuple[Carry, PyTree, Int[Array, ""], Bool[Array, ""]]:
    """Iterations start…stop−1 of a loop on one block of clients."""
    interpreter = plan.interpreter()
    records = None if record is None else recorded_rows(interpreter, record, carry, rows)
    return interpreter.loop(node, carry, key, round, path, start, stop, record, records, every)


def once(plan: Plan, node: Node | Apply, path: Path, carry: Carry, key: PRNGKeyArray, round: Int[Array, ""]) -> Carry:
    """One pass through a node on one block of clients."""
    return plan.interpreter().run(node, carry, key, round, path)


@eqx.filter_jit
def finite(states: PyTree, clients: int) -> Bool[Array, ""]:
    """Whether all numbers of all clients are finite; rows beyond are padding that answers to nobody."""
    leaves = [leaf[:clients] for leaf in jax.tree.leaves(states) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    return jnp.all(jnp.array([jnp.all(jnp.isfinite(leaf)) for leaf in leaves])) if leaves else jnp.ones((), bool)


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
        return self.finite(self.once(node, carry, key, round, path), OUTSIDE, round)

    def once(self, node: Any, carry: Carry, key: PRNGKeyArray, round: int, path: Path) -> Carry:
        return self.compiled(once, self.plan, (node, path), carry, key, jnp.asarray(round, jnp.int32))

    def repeat(self, node: Repeat, carry: Carry, key: PRNGKeyArray, round: int, path: Path) -> Carry:
        agreed = node.until is not None or node.times is not None  # only compiled code can end these
        deep = not agreed and has_loop(node.body) and work(node.body) > LEAVES_PER_CHUNK
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
            args = (self.plan, (node, path, record, self.every, rows), carry, key, jnp.asarray(round, jnp.int32))
            after, records, reached, agreed = self.compiled(chunk, *args, jnp.asarray(done), jnp.asarray(stop))
            if not self.is_finite(after):
                self.explain(node, path, args, done, stop)
            if record is not None:
                count = int(reached) // self.every - done // self.every
                self.history[node.name].append(jax.tree.map(lambda rows, k=count: rows[:k], records))
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
            after, *_ = self.compiled(chunk, *args, jnp.asarray(start), jnp.asarray(middle))
            good, bad, before = (middle, bad, after) if self.is_finite(after) else (good, middle, before)
        if has_loop(node.body):  # a loop inside may be to blame: walk this one round and let that loop say so
            try:
                self.walk(node.body, before, jax.random.fold_in(args[3], good), good, (*path, 0))
            except Diverged as inside:
                if inside.where != OUTSIDE:
                    raise
        raise Diverged(node.name, bad, "a smaller step size may help")

    def iterate(self, node: Repeat, carry: Carry, key: PRNGKeyArray, round: int, path: Path) -> Carry:
        """A loop whose body the host walks itself."""
        if node.until is not None or node.times is not None:
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
        gathered = jax.tree.map(lambda v: v[: self.plan.network.clients], message)
        answers = node.compute(gathered, leaf_key(key, Role.COMPUTE, 0))
        both = Carry((carry.states, pad_clients(answers, message)), carry.clock.advance(path), carry.totals)
        return self.once(Apply(node.receive, Role.RECEIVE, 2), both, key, round, path)

    def is_finite(self, carry: Carry) -> bool:
        return bool(finite(carry.states, self.plan.network.clients))

    def finite(self, carry: Carry, where: str, round: int) -> Carry:
        if not self.is_finite(carry):
            raise Diverged(where, round, "check the data and the step sizes")
        return carry

    def agreed(self, carry: Carry) -> Carry:
        if bool(carry.clock.split):
            raise HyperpushError("clients disagree about the end of a loop: the network did not reach everyone in time")
        return carry


def has_loop(node: Node) -> bool:
    return contains(node, lambda n: isinstance(n, Repeat) or (isinstance(n, Server) and n.host))


def pad_clients(tree: PyTree, like: PyTree) -> PyTree:
    """Repeat the last client until there are as many as in `like`."""
    rows = jax.tree.leaves(like)[0].shape[0]
    return jax.tree.map(lambda v: jnp.concatenate([v, jnp.repeat(v[-1:], rows - v.shape[0], axis=0)]), tree)


def conclude(walk: Walk, carry: Carry, sends: list[Sending], step: int) -> Outcome:
    """Collect a run's results on the host."""
    n = walk.plan.network.clients
    counts = {path: int(count) for path, count in carry.clock.sent.items()}
    history = {
        name: jax.tree.map(lambda *parts: jnp.concatenate(parts)[:, :n], *parts)
        for name, parts in walk.history.items()
        if parts
    }
    return Outcome(
        states=jax.tree.map(lambda v: v[:n], carry.states),
        step=int(carry.clock.step),
        rounds=int(carry.clock.step) - step,
        floats=sum(counts[s.path] * s.floats for s in sends),
        history=history,
        late=int(carry.clock.late),
        totals=carry.totals,
    )
