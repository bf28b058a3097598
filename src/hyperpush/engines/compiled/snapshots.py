"""Snapshots of a run: its recorded rows, and all arrays needed to resume it."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from hyperpush.base import processes
from hyperpush.base.errors import HyperpushError
from hyperpush.engines import keys
from hyperpush.engines.compiled.interpreter import Carry, Clock, Interpreter
from hyperpush.engines.compiled.tally import Tally, from_words
from hyperpush.engines.hooks import Snapshot, Trail
from hyperpush.engines.result import Recorder, RowClock, record_shapes
from hyperpush.programs import Profile, State, one_client


@dataclass
class RecordedRows:
    """The rows recorded so far, by name of their loop, with the clock of each row."""

    profile: Profile
    rows: dict[str, list[list[Array]]]  # leaves of records [rows, clients, …], by chunk
    clocks: dict[str, list[np.ndarray]]  # see `Clock.row`
    structures: dict[str, Any] = field(default_factory=dict)  # pytree structure of one loop's records, by name

    def copy(self) -> "RecordedRows":
        """Return a copy that later rows do not change."""
        rows, clocks = ({name: list(parts) for name, parts in each.items()} for each in (self.rows, self.clocks))
        return replace(self, rows=rows, clocks=clocks)

    def add(self, name: str, records: PyTree, clocks: np.ndarray) -> None:
        """Add rows of the loop `name`, and the clock of each row."""
        leaves, self.structures[name] = jax.tree.flatten(records)
        self.rows[name].append(leaves)
        self.clocks[name].append(clocks)

    def join_rows(self, name: str) -> list[Array]:
        """Return all rows of the loop `name`, leaf by leaf."""
        return [parts[0] if len(parts) == 1 else jnp.concatenate(parts) for parts in zip(*self.rows[name], strict=True)]

    def result(self, clients: int) -> dict[str, PyTree]:
        """Return all rows by name of their loop, with leaves [rows, clients, …]."""

        def ours(rows: Array) -> Array:
            whole = processes.gather(rows)
            return whole if whole.shape[1] == clients else processes.whole("record", whole)[:, :clients]

        return {
            name: self.structures[name].unflatten([ours(each) for each in self.join_rows(name)])
            for name, parts in self.rows.items()
            if parts
        }

    def row_clocks(self, end: Clock, clients: int, started: int) -> dict[str, RowClock]:
        """Return the network time and traffic at each row, by name of the loop.

        `end` is the clock at the end of the run, and `started` the network time at its start.
        """
        noted = {name: np.concatenate(parts) for name, parts in self.clocks.items() if parts}
        rows = {name: from_words(words[:, ::2], words[:, 1::2]) for name, words in noted.items()}
        found = {}
        for name, each in rows.items():
            exchanges = dict(zip(sorted(end.exchanges), each[:, 1:].T, strict=True))
            floats = np.broadcast_to(self.profile.floats(exchanges, clients), len(each))  # 0 without sending nodes
            found[name] = RowClock(each[:, 0], floats, started)
        return found


@dataclass(frozen=True)
class Structure:
    """The shapes of all arrays in snapshots of a run. The profile holds one client's state at each path."""

    context: Interpreter
    profile: Profile
    start: Carry
    recorders: Mapping[str, Recorder]

    def of_client(self, trail: Trail) -> tuple[State, list[State], PyTree]:
        """Return the shapes of one client's state, the states outside of enclosing scopes, and its message counts."""
        path, found = trail[-1][0] if trail else (), self.profile
        sent = dict.fromkeys(self.start.sent, jax.eval_shape(Tally.start))
        return (found.states[path] if trail else found.result), found.held(path), sent


def take(
    structure: Structure, trail: Trail, carry: Carry, held: list[State], history: RecordedRows, extra: Counter[str]
) -> Snapshot | None:
    """Return a snapshot of a run; None if its arrays were overwritten or differ from the profile's shapes."""
    rows, own = jax.tree.flatten((carry.states, held, carry.sent))
    like, known = jax.tree.flatten(structure.of_client(trail))
    same = own == known and all((a.shape[1:], a.dtype) == (b.shape, b.dtype) for a, b in zip(rows, like, strict=True))
    if not same or any(leaf.is_deleted() for leaf in rows):
        return None
    whole = jax.tree.leaves((carry.clock, carry.totals))
    arrays = {f"{name} {k}": leaf for name, part in (("rows", rows), ("whole", whole)) for k, leaf in enumerate(part)}
    for name, clocks in history.clocks.items():
        if clocks:
            arrays |= {f"history {name} {place}": leaf for place, leaf in enumerate(history.join_rows(name))}
            arrays[f"clock {name}"] = np.concatenate(clocks)
    return Snapshot(trail, arrays, structure.context.network.clients, dict(extra))


def restore(structure: Structure, snapshot: Snapshot, history: RecordedRows) -> tuple[Carry, list[State]]:
    """Return the carry and the states outside of enclosing scopes. Add the snapshot's rows to `history`."""
    context, arrays = structure.context, snapshot.arrays

    def load(name: str, like: PyTree, axis: int) -> PyTree:
        leaves, known = jax.tree.flatten(like)
        return known.unflatten([_place(context, arrays[f"{name} {k}"], leaf, axis) for k, leaf in enumerate(leaves)])

    states, held, sent = load("rows", structure.of_client(snapshot.trail), 0)
    leaves, known = jax.tree.flatten((structure.start.clock, structure.start.totals))
    whole = [jnp.asarray(arrays[f"whole {place}"].read()) for place in range(len(leaves))]
    clock, totals = context.replicate(known.unflatten(whole))
    for name, each in structure.recorders.items():
        if f"clock {name}" in arrays:
            leaves, history.structures[name] = jax.tree.flatten(
                load(
                    f"history {name}",
                    record_shapes(structure.profile, name, each, context.network.clients, one_client(context.data)),
                    1,
                )
            )
            history.rows[name], history.clocks[name] = [leaves], [arrays[f"clock {name}"].read()]
    return Carry(states, clock, totals, sent), held


def _place(context: Interpreter, stored: Any, like: jax.ShapeDtypeStruct, axis: int) -> Array:
    """Return an array of a snapshot with each client on its device; `like` has the shape of one client."""
    one = keys.as_bits(like)
    shape = (*stored.shape[:axis], context.network.clients, *one.shape)
    if (stored.shape, stored.dtype) != (shape, one.dtype):
        raise HyperpushError(
            f"the checkpoint holds {stored.dtype}{list(stored.shape)} where this run needs "
            f"{one.dtype}{list(shape)}: the code or the data have changed since; start a new run"
        )
    return keys.from_bits(context.assemble(shape, axis, stored.read), like.dtype)
