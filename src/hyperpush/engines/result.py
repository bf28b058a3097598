"""Types for the result of a run, its recorded rows, and its progress reports."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, final

import equinox as eqx
import numpy as np
from jaxtyping import Int, PyTree

from hyperpush.engines.totals import Totals
from hyperpush.programs import Context, Path, Profile, State, traced
from hyperpush.programs.counting import Work
from hyperpush.programs.recipe import with_arrays

RecordFunction = Callable[[State, Context], PyTree]


@final
class Recorder(eqx.Module):
    """Record `f(state, context)` of every client in a loop, after every `every`-th iteration.

    `entry=True` adds a first row with the state before the loop's first iteration. `last` is an iteration that gets a
    row even if `every` does not divide it; 0 names none.
    """

    f: RecordFunction
    entry: bool = eqx.field(static=True, default=False)
    last: int = eqx.field(static=True, default=0)

    def due(self, done: Any, every: int) -> Any:
        """Return True if a row is recorded after iteration number `done`, counted from 1."""
        due = done % every == 0
        return due | (done == self.last) if self.last % every else due

    def count(self, done: int, every: int) -> int:
        """Return the number of rows recorded in the first `done` iterations."""
        return done // every + self.entry + (0 < self.last <= done and self.last % every > 0)

    def iteration(self, row: int, every: int) -> int:
        """Return the number of iterations before a row; row 0 is the state before the first iteration."""
        return min(row * every, self.last) if self.last else row * every


Record = Recorder | RecordFunction  # a bare function is `Recorder(f)`


Recorders = Mapping[str, Record]


def recorders_of(record: Recorders | None) -> dict[str, Recorder]:
    """Return the recorders by name of their loop. Numbers in them become arrays, so new numbers need no compilation."""
    made = {name: each if isinstance(each, Recorder) else Recorder(each) for name, each in (record or {}).items()}
    return with_arrays(made)


def record_shapes(found: Profile, name: str, recorder: Recorder, clients: int, data: PyTree) -> PyTree:
    """Return the shapes of a recorder's row for one client in the loop `name`; `data` are that client's data."""
    body = next(body for body, _, loop in found.loops if loop.name == name)
    return traced(recorder.f, clients, data, found.states[body])[0]


@final
@dataclass(frozen=True)
class RowClock:
    """Network time and number of values sent, at each row of a record."""

    step: Int[np.ndarray, " rows"]  # network time
    floats: Int[np.ndarray, " rows"]  # numbers that each client had sent in the run (a message to several counts once)
    started: int = 0  # network time at the start of the run

    @property
    def rounds(self) -> Int[np.ndarray, " rows"]:
        """Number of communication rounds in the run before each row."""
        return self.step - self.started


Progress = Callable[[str, int, int], None]  # a loop's name, iterations done, their maximum


class Rows(NamedTuple):
    """Rows that a run recorded before it diverged, as in `RunResult`."""

    history: dict[str, PyTree]
    clocks: "dict[str, RowClock]"


OUTSIDE = "program"  # name that an error gives to code outside of all loops


@dataclass(frozen=True)
class RunResult:
    """Result of a run: final states, costs and history."""

    states: PyTree  # every client's state, clients on axis 0
    step: int  # network time after the run: the next run starts here
    rounds: int  # number of communication rounds
    floats: int  # numbers that each client sent (a message to several receivers counts once)
    work: Work  # gradients and products that each client computed, by kind and data set (server work is not counted)
    history: dict[str, PyTree]  # by loop: values of its record function, leaves [records, clients, …]
    late: int = 0  # messages dropped because they missed their round; in the simulator also those in transit at the end
    rejected: dict[str, int] = field(default_factory=dict)  # messages refused by peers, by reason
    # Messages with invalid content from other parties: counts by name of the party and by reason.
    refused: dict[str, dict[str, int]] = field(default_factory=dict)
    isolated: str = ""  # a sentence if a party's averages contain little of other parties' values; else empty
    totals: dict[Path, Totals] = field(default_factory=dict)  # on a faulty network: running sums of each link
    clocks: dict[str, RowClock] = field(default_factory=dict)  # by loop: network time and traffic at its rows
    # Bytes that each client sent: the size of a message for each live link that it used, and once to a server.
    bytes: Int[np.ndarray, " clients"] = field(default_factory=lambda: np.zeros(0, np.int64))
