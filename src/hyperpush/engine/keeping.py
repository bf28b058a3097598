"""Where a run is, outside of compiled code: what is kept of it there, and how it goes on when it was cut off.

A run that goes on first walks on shapes alone (`goal`), past everything that is done, so that what was kept finds its
structure.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from hyperpush import planning
from hyperpush.checkpoints.journal import Contents, Piece, Trail, current, digest_of
from hyperpush.counting import Work
from hyperpush.engine.interpret import Carry
from hyperpush.engine.layout import Plan, one_client
from hyperpush.engine.outcome import Record
from hyperpush.program import Node, Path, Repeat, State, contains, traced


def one_device(part: str) -> None:
    """All arrays of a run on one device."""
    return


class Position:
    """Where a run is: the loops that it is in, what encloses them, what was recorded."""

    def __init__(
        self,
        plan: Plan,
        recorders: Mapping[str, Record],
        every: int,
        sharding: Callable[[str], Any] = one_device,
    ):
        self.plan = plan
        self.recorders = recorders
        self.every = every
        self.sharding = sharding  # of "states", the "clock" and the "history"
        self.history: dict[str, list[list[Array]]] = {name: [] for name in recorders}  # leaves of records, by chunk
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

    def note(self, node: Repeat, records: PyTree) -> None:
        leaves, self.structures[node.name] = jax.tree.flatten(records)
        self.history[node.name].append(leaves)

    def shaped(self, f: Callable[..., Any], *args: PyTree) -> Any:
        """f(*args), on shapes alone before the goal."""
        return f(*args) if self.goal is None else jax.eval_shape(f, *args)

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
