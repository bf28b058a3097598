"""Record measurements during a run, and make a `History` from them."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

from hyperpush.base.checks import no_type_check
from hyperpush.base.errors import InvalidInput
from hyperpush.data.batches import full_batch
from hyperpush.engines.result import Recorder, Rows, RunResult
from hyperpush.programs import Context
from hyperpush.programs.recipe import what_is_read
from hyperpush.task.problem import Cost, Problem
from hyperpush.task.task import Task
from hyperpush.verbs.results import RESERVED, History

Metrics = Mapping[str, Cost | tuple[str, Cost]]
ROWS = 200  # approximate default number of rows of a history
HYPERS = 10_000_000  # a history includes hypers up to this many numbers, counted over all clients and rows


class Measured(eqx.Module):
    """Function that measures one client after a step: its outer cost, its metrics and its hypers."""

    problem: Problem
    metrics: tuple[tuple[str, str, Cost], ...]  # (name, data set, metric)
    cost: bool = eqx.field(static=True)
    hypers: bool = eqx.field(static=True)
    reads: str = eqx.field(static=True)  # digest of values that the metrics read and compiled code contains

    def __call__(self, state: Any, ctx: Context) -> dict[str, Any]:
        at = state.params, state.hyper
        row: dict[str, Any] = {
            "metrics": {
                name: self.problem.measure(metric, *at, full_batch(ctx.data.sets[on]))
                for name, on, metric in self.metrics
            }
        }
        if self.cost:
            row["cost"] = self.problem.outer_cost(*at, full_batch(ctx.data.outer))
        if self.hypers:
            row["hypers"] = state.hyper
        if hasattr(state, "hypergradient"):
            row["norm"] = jnp.asarray(optax.tree.norm(state.hypergradient), jnp.zeros(()).dtype)
        if getattr(state, "watch", None) is not None:
            row["watched"] = state.watch.mean
        return row


@no_type_check
def recorder(task: Task, metrics: Metrics | None, rows: int = 0, last: int = 0) -> Recorder:
    """Return the recorder of a loop, which measures metrics, costs and hypers.

    It leaves out costs of private tasks and joint outer costs. It records hypers if `rows` rows of them have at most
    `HYPERS` numbers. Iteration `last` is always recorded; with `last=0`, only every `every`-th iteration.
    """
    wanted = checked_metrics(task, metrics)
    numbers = rows * sum(leaf.size for leaf in jax.tree.leaves(task.hypers))
    cost = task.privacy is None and not task.joint
    reads = what_is_read([metric for *_, metric in wanted])
    return Recorder(Measured(task.problem, wanted, cost, 0 < numbers <= HYPERS, reads), entry=True, last=last)


def checked_metrics(task: Task, metrics: Any) -> tuple[tuple[str, str, Cost], ...]:
    """Return the metrics as tuples (name, data set, function).

    Invalid metrics raise InvalidInput, and so does any metric on a private task.
    """
    if metrics is None:
        return ()
    if not isinstance(metrics, Mapping):
        raise InvalidInput("metrics", metrics, 'a dict such as {"accuracy": f} or {"accuracy": ("test", f)}')
    found = []
    for name, given in metrics.items():
        pair: Any = given if isinstance(given, tuple) and len(given) == 2 else (task.outer_on, given)
        on, metric = pair
        if not isinstance(name, str) or name in RESERVED:
            raise InvalidInput("metrics", name, f"names other than {', '.join(RESERVED)}, which histories have already")
        if not callable(metric) or not isinstance(on, str):
            raise InvalidInput(f"metrics.{name}", given, 'a function of (params, hyper, batch), or ("test", function)')
        if task.privacy is not None:
            allowed = "no metrics on a private task: their values would leave a client without noise; a metric to "
            allowed += "choose the step by is released with stop=hp.EarlyStopping(metric, on=…, patience=…, bounds=…)"
            raise InvalidInput(f"metrics.{name}", "a metric", allowed)
        task.check_metric(f"metrics.{name}", cast(Cost, metric), on)
        found.append((str(name), on, metric))
    return tuple(found)


def rows_apart(steps: int) -> int:
    """Return the number of steps between recorded rows that gives at most about `ROWS` rows.

    The result divides `steps` if a suitable divisor exists.
    """
    if steps <= ROWS:
        return 1
    least = -(-steps // ROWS)
    return next((every for every in range(least, steps // 20 + 1) if steps % every == 0), least)


def finite_history(run: Rows, loop: str, recorder: Recorder, every: int) -> History | None:
    """Return the recorded rows of a loop before its first non-finite row; None if the loop was not recorded."""
    if loop not in run.history:
        return None
    leaves = jax.tree.leaves(run.history[loop])
    sound = [np.isfinite(np.asarray(leaf)).reshape(len(leaf), -1).all(axis=1) for leaf in leaves if leaf.size]
    good = int(np.argmin([*np.all(sound, axis=0), False])) if sound else 0
    rows = {loop: jax.tree.map(lambda leaf: np.asarray(leaf)[:good], run.history[loop])}
    clock = run.clocks[loop]
    clocks = {loop: replace(clock, step=clock.step[:good], floats=clock.floats[:good])}
    return history_of(Rows(rows, clocks), loop, recorder, every)


def history_of(run: RunResult | Rows, loop: str, recorder: Recorder, every: int) -> History:
    """Return the recorded rows of a loop as a `History`, which is empty if the loop was not recorded."""
    rows, clock = run.history.get(loop), run.clocks.get(loop)
    if rows is None or clock is None:
        none = np.zeros(0, np.int64)
        return History(none, none, none)

    def on_host(values: Float[Array, "..."]) -> np.ndarray:
        return np.array(values, np.float64)  # a copy, because JAX arrays are read-only

    norm = on_host(rows["norm"]) if "norm" in rows else None
    if norm is not None and len(norm):
        norm[0] = np.nan  # no hypergradient has been computed at the start
    return History(
        np.array([recorder.iteration(row, every) for row in range(len(clock.step))], np.int64),
        clock.rounds,
        clock.floats,
        on_host(rows["cost"]) if "cost" in rows else None,
        {name: on_host(values) for name, values in rows["metrics"].items()},
        rows.get("hypers"),
        norm,
        on_host(rows["watched"]) if "watched" in rows else None,
    )
