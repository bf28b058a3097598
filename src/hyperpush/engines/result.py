"""What a run leaves behind, and what it tells while it goes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, final, runtime_checkable

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
    """What is kept of a loop: `f(state, context)` of every client, after every `every`-th iteration.

    With `entry`, a row more, the first: of the state on entering the loop, before its first iteration.
    """

    f: RecordFunction
    entry: bool = eqx.field(static=True, default=False)


Record = Recorder | RecordFunction  # a bare function is `Recorder(f)`


Recorders = Mapping[str, Record]


def recorders_of(record: Recorders | None) -> dict[str, Recorder]:
    """What to record, by name of a loop. Its numbers are arrays: like those of a recipe, a new one compiles nothing."""
    made = {name: each if isinstance(each, Recorder) else Recorder(each) for name, each in (record or {}).items()}
    return with_arrays(made)


def record_shapes(found: Profile, name: str, recorder: Recorder, clients: int, data: PyTree) -> PyTree:
    """The shapes that a recorder returns of one client's state in the loop of a name; `data` are that client's."""
    body = next(body for body, _, loop in found.loops if loop.name == name)
    return traced(recorder.f, clients, data, found.states[body])[0]


@final
@dataclass(frozen=True)
class RowClock:
    """What had happened when each row of a record was made."""

    step: Int[np.ndarray, " rows"]  # network time
    floats: Int[np.ndarray, " rows"]  # numbers each client had sent in the run (a message to several counts once)
    started: int = 0  # network time at the start of the run

    @property
    def rounds(self) -> Int[np.ndarray, " rows"]:
        """Exchanges that had taken place in the run."""
        return self.step - self.started


Progress = Callable[[str, int, int], None]  # a loop's name, iterations done, iterations at most


@runtime_checkable
class Listener(Protocol):
    """A `Progress` that is shown the rows that are recorded, too, as soon as the host has them."""

    def __call__(self, loop: str, done: int, total: int, /) -> None: ...

    def rows(self, loop: str, iterations: list[int], records: PyTree, /) -> None:
        """Rows of a loop's history, made after so many iterations; leaves [rows, clients, …]."""
        ...


class Rows(NamedTuple):
    """Rows that a run recorded before it diverged, as in `RunResult`."""

    history: dict[str, PyTree]
    clocks: "dict[str, RowClock]"


OUTSIDE = "program"  # where numbers go wrong outside of loops


@dataclass(frozen=True)
class RunResult:
    """What a run leaves behind."""

    states: PyTree  # every client's state, clients on axis 0
    step: int  # network time after the run: the next run starts here
    rounds: int  # exchanges that took place
    floats: int  # numbers each client sent (a message to several receivers counts once)
    work: Work  # gradients and products that each client computed (a server's are nobody's), by kind and data set
    history: dict[str, PyTree]  # by loop: what its record function returned, leaves [records, clients, …]
    late: int = 0  # messages that missed their round and were dropped (the simulator counts those under way at the end)
    rejected: dict[str, int] = field(default_factory=dict)  # messages refused by peers, by reason
    # Messages of members whose content cannot be true: by name of the member and reason.
    refused: dict[str, dict[str, int]] = field(default_factory=dict)
    totals: dict[Path, Totals] = field(default_factory=dict)  # running sums of the links on a faulty network
    clocks: dict[str, RowClock] = field(default_factory=dict)  # by loop: when the rows of its history were made
    # Bytes each client sent: the size of a message for every live link it went over, and once to a server.
    bytes: Int[np.ndarray, " clients"] = field(default_factory=lambda: np.zeros(0, np.int64))
