"""Where a run is, outside of compiled code: what is kept of it there, and how it goes on when it was cut off.

A run that goes on first walks on shapes alone (`goal`), past everything that is done, so that what was kept finds its
structure.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from hyperpush.engines import planning
from hyperpush.engines.interpret import Carry
from hyperpush.engines.layout import Plan, one_client
from hyperpush.engines.result import Recorder
from hyperpush.programs import Node, Path, Profile, Repeat, State, contains, traced
from hyperpush.programs.counting import Work
from hyperpush.runs.checkpoints.journal import Contents, Piece, Trail, current, digest_of


def one_device(part: str) -> None:
    """All arrays of a run on one device."""
    return


class Position:
    """Where a run is: the loops that it is in, what encloses them, what was recorded."""

    def __init__(
        self,
        plan: Plan,
        recorders: Mapping[str, Recorder],
        found: Profile,
        every: int,
        sharding: Callable[[str], Any] = one_device,
    ):
        self.plan = plan
        self.recorders = recorders
        self.every = every
        self.sharding = sharding  # of "states", the "clock" and the "history"
        self.history: dict[str, list[list[Array]]] = {name: [] for name in recorders}  # leaves of records, by chunk
        self.found = found
        self.loops = {body[:-1]: number for number, (body, _, _) in enumerate(found.loops)}  # their numbers, by path
        # When each record was made: number of the loop, times entered, iterations since, and a row of the clock.
        self.clocks: dict[str, list[np.ndarray]] = {name: [] for name in recorders}
        self.structures: dict[str, Any] = {}  # of the records
        self.extra = Work()
        self.journal = current()
        self.piece: Piece | None = None
        self.goal: Trail | None = None  # where concrete numbers begin; None: here
        self.trail: Trail = ()  # the loops that the host is in
        self.held: list[State] = []  # the states outside of each part that has a state of its own
        self.recorded: dict[str, list[Any]] = {}  # shapes of one client's records, of loops passed before the goal
        self.stepped = 0  # network time when rounds were last counted
        self.largest = 0  # bytes of all clients' states before the goal
        self.opaque: int | None = None  # depth of the loop whose state depends on a server in plain Python

    def note(self, node: Repeat, path: Path, records: PyTree, clocks: np.ndarray, iterations: Iterable[int]) -> None:
        """Keep records, made after so many iterations of a loop."""
        leaves, self.structures[node.name] = jax.tree.flatten(records)
        self.history[node.name].append(leaves)
        entered = 0  # of the loops around this one only the host's own run more than once, and they have fixed lengths
        for around, i in self.trail:
            entered = entered * self.found.loops[self.loops[around]][2].at_most + i
        made = [(self.loops[path], entered + 1, i) for i in iterations]
        self.show(node.name, [i for _, _, i in made], records)
        self.clocks[node.name].append(np.concatenate([np.array(made, np.int32).reshape(-1, 3), clocks], axis=1))

    def show(self, loop: str, iterations: list[int], records: PyTree) -> None:
        """Records that were just made, to whoever wants to see them."""

    def shaped(self, f: Callable[..., Any], *args: PyTree) -> Any:
        """f(*args), on shapes alone before the goal."""
        return f(*args) if self.goal is None else jax.eval_shape(f, *args)

    def approach(self, node: Repeat, carry: Carry, path: Path) -> tuple[Carry, int]:
        """The carry with which a loop begins, and how many of its iterations are done."""
        if self.goal is None:
            return carry, 0
        if record := self.recorders.get(node.name):
            shapes = traced(record.f, self.plan.network.clients, *one_client((self.plan.data, carry.states)))[0]
            self.recorded[node.name], self.structures[node.name] = jax.tree.flatten(shapes)
        self.largest = max(self.largest, planning.size((carry.states, self.held)))
        depth = len(self.trail)
        if depth >= len(self.goal) or self.goal[depth][0] != path:
            return carry, node.at_most  # it lies behind
        done = self.goal[depth][1]
        return (self.load(carry) if depth + 1 == len(self.goal) else carry), done

    def contents(self, carry: Carry) -> Contents:
        """All that is needed to go on from here, or with the result."""
        parts = [jax.tree.leaves(carry), jax.tree.leaves(self.held)]
        counts = {}
        for name, rows in self.history.items():
            if rows:
                parts.append([joined(*each) for each in zip(*rows, strict=True)])
                counts[name] = len(parts[-1])
        parts.append([np.concatenate(self.clocks[name]) for name in counts])
        return Contents([leaf for part in parts for leaf in part], {"history": counts, "extra": dict(self.extra)})

    def load(self, shapes: Carry) -> Carry:
        """The carry that was kept, in place of its shapes; what encloses it and the history, too."""
        assert self.piece is not None
        states, structure = jax.tree.flatten(shapes.states)
        clock, clock_structure = jax.tree.flatten((shapes.clock, shapes.totals))
        rows, rows_structure = jax.tree.flatten((shapes.sent, self.held))
        like = [*states, *clock, *rows]
        where = [self.sharding("states")] * len(states) + [self.sharding("clock")] * len(clock)
        where += [self.sharding("states")] * len(rows)
        kept = self.piece.shapes()[len(like) :]
        padded = states[0].shape[0] if states else self.plan.network.clients
        recorded = self.piece.facts["history"]
        records = sum(recorded.values())
        for shape, dtype in kept[:records]:
            like.append(jax.ShapeDtypeStruct((shape[0], padded, *shape[2:]), dtype))
            where.append(self.sharding("history"))
        for shape, dtype in kept[records : records + len(recorded)]:
            like.append(jax.ShapeDtypeStruct(shape, dtype))
            where.append(None)
        found = iter(self.piece.load(like, where))

        def take(structure: Any, count: int) -> Any:
            return jax.tree.unflatten(structure, [next(found) for _ in range(count)])

        loaded = take(structure, len(states))
        clock, totals = take(clock_structure, len(clock))
        sent, self.held = take(rows_structure, len(rows))
        for name, count in recorded.items():
            self.history[name] = [[next(found) for _ in range(count)]]
        for name in recorded:
            self.clocks[name] = [np.asarray(next(found))]
        self.extra = Work(self.piece.facts["extra"])
        self.goal, self.stepped = None, int(clock.step)
        return Carry(loaded, clock, totals, sent)

    def boundary(self, carry: Carry, path: Path, done: int, iterations: int) -> None:
        """Between two chunks: the run can be cut here."""
        if self.piece is None:
            return
        self.count(carry, iterations)
        if self.opaque is not None and len(self.trail) >= self.opaque:
            self.piece.passed()
            return
        held = list(self.held)
        history = {name: list(rows) for name, rows in self.history.items()}
        clocks = {name: list(rows) for name, rows in self.clocks.items()}

        def contents() -> Contents:
            now = self.held, self.history, self.clocks
            self.held, self.history, self.clocks = held, history, clocks
            try:
                return self.contents(carry)
            finally:
                self.held, self.history, self.clocks = now

        self.piece.reached((*self.trail, (path, done)), contents)

    def count(self, carry: Carry, iterations: int) -> None:
        """Rounds since the last checkpoint: exchanges, or iterations where nothing is exchanged."""
        if self.journal is not None:
            now = int(carry.clock.step)
            self.journal.rounds += max(iterations, now - self.stepped)
            self.stepped = now

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


def joined(*parts: Array) -> Array:
    """Records one after the other."""
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts)
