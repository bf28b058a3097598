"""Estimates of the costs of an experiment, by an engine that profiles programs instead of running them.

Each engine call is profiled and returns arrays of ones of the right shape. Code between the calls runs as usual.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, final

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from hyperpush.base import processes
from hyperpush.base.errors import InvalidInput
from hyperpush.engines.base import Engine, Request, surround
from hyperpush.engines.compiled.run import prepare
from hyperpush.engines.result import Recorder, RowClock, RunResult, record_shapes
from hyperpush.privacy import ASSUMPTION
from hyperpush.programs import Profile, all_clients, bytes_of, one_client

LARGE = 1 << 24  # bytes; larger arrays of ones are stored as a single number


@final
class Planner(Engine):
    """Engine that runs nothing: each call returns ones, and its costs on `processes` processes are noted."""

    processes: int = eqx.field(static=True, default=1)
    # One row of costs per call. Costs are upper bounds, because loops that clients agree to end may end earlier.
    # `parameters` is the largest number of values in one client's state during the call. `floats` is the number of
    # values that a client sends.
    pieces: list[dict[str, Any]] = eqx.field(static=True, default_factory=list)

    def active(self) -> AbstractContextManager[None]:
        """Return a context manager in whose block this planner replaces the compiled engines."""
        return surround(engine=self)

    def execute(self, request: Request) -> RunResult:
        """See `Engine.run`."""
        network, states, data, step = request.network, request.states, request.data, request.step
        found, _, known = prepare(request)
        n, passes, agreement, tree = network.clients, found.passes(), known["agreement"], known["tree"]
        sent = [(passes[s.body] * s.messages(agreement), s) for s in found.sendings]
        rounds = sum(passes[s.body] * tree.planned_rounds if s.by_tree else times for times, s in sent)
        floats = sum(times * s.floats for times, s in sent)
        agreed = {body: passes[body] for body, _, loop in found.loops if loop.agreed}
        held = ((state, found.held(path)) for path, state in found.states.items())
        largest = n * max(map(bytes_of, (*held, found.result)))
        piece = {
            "call": ", ".join(dict.fromkeys(loop.name for _, _, loop in found.loops)) or "no loop",
            "clients": n,
            "parameters": largest // (n * jnp.zeros(()).dtype.itemsize),
            "rounds": rounds,
            "floats": floats,
            "bytes_per_round": sum(times * s.bytes for times, s in sent) / max(rounds, 1),
            "megabytes_per_process": self.held(largest, n, states, data) / 2**20,
        }
        self.pieces.append(piece)
        recorders = request.recorders
        rows = {name: planned_rows(found, name, each, request.every) for name, each in recorders.items()}
        shapes = {name: record_shapes(found, name, each, n, one_client(data)) for name, each in recorders.items()}
        none = {name: np.zeros(count, np.int64) for name, count in rows.items()}
        return RunResult(
            states=ones(all_clients(found.result, n)),
            step=step + rounds,
            rounds=rounds,
            floats=floats,
            work=found.total(agreed),
            history={name: ones(all_clients(all_clients(each, n), rows[name])) for name, each in shapes.items()},
            clocks={name: RowClock(zeros, zeros) for name, zeros in none.items()},
            bytes=np.zeros(n, np.int64),
        )

    def held(self, largest: int, clients: int, states: PyTree, data: PyTree) -> float:
        """Return the bytes that a process holds: the data, and the states twice, as loops do."""
        held = 2 * largest + bytes_of(data)
        if self.processes == 1:
            return held
        # Besides its own clients' part, a process holds the states and data of all clients, and gathered results.
        block, handed = -(-clients // self.processes), largest if largest <= processes.GATHERED else 0
        return held * block / clients + bytes_of((states, data)) + handed


def planned_rows(found: Profile, name: str, recorder: Recorder, every: int) -> int:
    """Return the largest number of rows that a recorder notes in the loops called `name`."""
    passes = found.passes()
    loops = [(passes[around], loop.at_most) for _, around, loop in found.loops if loop.name == name]
    return sum(entered * recorder.count(at_most, every) for entered, at_most in loops)


def ones(shapes: PyTree) -> PyTree:
    """Return arrays of ones with these shapes, so that user code can divide them. Large arrays take no memory."""

    def one(leaf: Any) -> Any:
        if bytes_of(leaf) > LARGE and not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return np.broadcast_to(np.ones((), leaf.dtype), leaf.shape)
        return jnp.ones(leaf.shape, leaf.dtype)

    return jax.tree.map(one, shapes)


def plan(run: Callable[[Callable[[Any], None]], Any], processes: int) -> dict[str, Any]:
    """Return the costs of the engine calls in `run`, their totals, and the privacy losses ε that `run` reports.

    `run(note)` may call `note` with intermediate records.
    """
    planner, stopped = Planner(processes), None
    epsilon: dict[str, float] = {}
    with planner.active():
        try:
            find_epsilon(run(lambda values: find_epsilon(values, epsilon)), epsilon)
        except Exception as error:  # code of the experiment may fail on results that are all ones
            if isinstance(error, InvalidInput) and not planner.pieces:
                raise  # no call has been answered with ones yet: the input itself is invalid
            stopped = f"{type(error).__name__}: {error}".splitlines()[0]
    pieces = planner.pieces
    return {
        "processes": processes,
        "pieces": pieces,
        **{name: sum(each[name] for each in pieces) for name in ("rounds", "floats")},
        "megabytes_per_process": max((each["megabytes_per_process"] for each in pieces), default=0.0),
        "epsilon": epsilon,
        "assumes": ASSUMPTION if epsilon else None,
        "stopped": stopped,
    }


def find_epsilon(values: Any, found: dict[str, float], where: str = "") -> None:
    """Add to `found` each ε in a record or a result, by name; keep the largest of each name."""
    if isinstance(values, dict):
        for name, value in values.items():
            find_epsilon(value, found, str(name))
    elif isinstance(values, list | tuple):
        for value in values:
            find_epsilon(value, found, where)
    elif isinstance(values, float | int) and ("epsilon" in where or where == "claimed"):
        found[where] = max(float(values), found.get(where, 0.0))
